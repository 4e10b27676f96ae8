"""What kernels must give, computed on the host."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def norm(values: Tensor, order: float) -> float:
    """Return the norm in float64; NaN if an element is NaN, else inf if one is infinite."""
    wide = values.to(torch.complex128).abs() if values.is_complex() else values
    if values.dtype.itemsize < 8 and wide.numel():  # float64 holds the powers of what float32 holds
        return float(torch.linalg.vector_norm(wide, order, dtype=torch.float64))
    wide = wide.to(torch.float64).abs().reshape(-1)
    top = float(wide.amax()) if wide.numel() else 0.0
    if math.isinf(order) or top == 0 or not math.isfinite(top):
        return top
    return float(top * ((wide / top) ** order).sum() ** (1 / order))


def rounded_sum(total: Tensor, grad: Tensor) -> Tensor:
    """Return the sum, rounded once to the dtype of `total`.

    Twice the digits and two more make the first of two roundings harmless (Figueroa, "When is double
    rounding innocuous?", 1995): float32 is enough for 16 bits, float64 for float32.
    """
    wide = torch.float32 if total.dtype.itemsize == 2 and grad.dtype.itemsize == 2 else torch.float64
    return (total.to(wide) + grad.to(wide)).to(total.dtype)


def product(values: Tensor, factor: float) -> Tensor:
    """Return the float32 product (float64 for float64), rounded once to the dtype of `values`."""
    if values.is_complex():
        return torch.view_as_complex(product(torch.view_as_real(values), factor))
    wide = torch.promote_types(values.dtype, torch.float32)
    return (values.to(wide) * torch.tensor(factor, dtype=torch.float32).to(wide)).to(values.dtype)


def nonfinite(values: Tensor) -> bool:
    """Whether `values` contain inf or NaN."""
    real = torch.view_as_real(values) if values.is_complex() else values
    return float((real * 0).sum()) != 0  # inf and NaN times 0 are NaN
