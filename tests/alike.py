"""Whether an op gave the same result twice, up to the last bits of LAPACK."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def same(one: Any, other: Any, rtol: float, atol: float) -> bool:
    """Compare dtype, shape, layout and values; what is no tensor must be equal."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other or one != one)
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    one, other = (t.to_dense() if t.layout is not torch.strided else t for t in (one, other))
    return torch.allclose(one, other, rtol, atol, equal_nan=True)
