"""How values are written."""

from __future__ import annotations

import hashlib
import math
from typing import Any


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def json_value(value: Any) -> Any:
    """Return `value`; inf and NaN, which JSON lacks, as strings."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return `number` with the noun `one`, or with its plural: `many`, or `one` and an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def digest(value: object) -> str:
    """Return hexadecimal digits that stand for ``repr(value)``, the same in every process."""
    return hashlib.sha256(repr(value).encode()).hexdigest()
