"""The cast of one tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_METHODS: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: Tensor.float,
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
}


def to_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor.to(dtype)``; methods such as ``float`` are faster, for ``to`` tries many signatures."""
    method = _METHODS.get(dtype)
    return tensor.to(dtype) if method is None else method(tensor)
