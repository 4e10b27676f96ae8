"""How values are written."""

from __future__ import annotations

import math
from typing import Any


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def json_value(value: Any) -> Any:
    """Return `value`; inf and NaN, which JSON lacks, as strings."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
