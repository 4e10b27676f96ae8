"""The few numbers that a step is made of, as tensors on the device of the scale."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def valid_scale(value: float) -> float:
    """Return `value` as a float if it can be a scale.

    Raises:
        ValueError: it is not positive and finite.
    """
    number = float(value)
    if not (math.isfinite(number) and number > 0.0):
        raise ValueError(f"The scale must be positive and finite, got {value!r}.")
    return number


def zero(device: torch.device) -> Tensor:
    """Return a flag that says nothing was found."""
    return torch.zeros((), dtype=torch.float32, device=device)


def reciprocal(scale: Tensor) -> Tensor:
    """Return 1 / `scale`, through float64 where the device has it, as torch does."""
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that brings `norm` down to `max_norm`, at most 1 (torch/nn/utils/clip_grad.py)."""
    return (norm + 1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)


def combine(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return one flag on `device`, 1.0 if any of `flags` is, else 0.0; a lone one is returned itself."""
    if len(flags) == 1 and flags[0].device == device:
        return flags[0]
    here = [flag.reshape(()).to(device, non_blocking=True) for flag in flags]
    return torch.stack(here).amax(0) if here else zero(device)


def overflows(norm: Tensor, divisor: Tensor) -> Tensor:
    """Return 1.0 where `divisor` is so small that finite gradients of this norm leave float32 by it."""
    # Less than half of the smallest normal number has no finite reciprocal.
    limit = (divisor - _TINY / 2) * torch.finfo(torch.float32).max
    return ((norm < limit).logical_not() & (limit != torch.inf)).float()


_TINY = torch.finfo(torch.float32).tiny
