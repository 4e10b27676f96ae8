"""The few numbers that a step is made of, as tensors on the device of the scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from amp_core.state import float32

is_tracing = torch.compiler.is_dynamo_compiling


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


def _is_at_hand(*numbers: Tensor) -> bool:
    """Whether the host can read `numbers` without waiting, and then computes faster than torch."""
    return not is_tracing() and all(type(n) is Tensor and n.is_cpu for n in numbers)


def _read(number: Tensor) -> float:
    return cast("float", number.tolist())  # no operation of torch's, and so none that is counted as a wait


def _inverse(scale: Tensor) -> float:
    value = _read(scale)
    return float32(1.0 / value) if value else math.copysign(math.inf, value)


def _rounded(value: float, like: Tensor) -> float:
    return float32(value) if like.dtype is torch.float32 else value


def reciprocal(scale: Tensor) -> Tensor:
    """Return 1 / `scale`, through float64 where the device has it, as torch does."""
    if _is_at_hand(scale):
        return torch.full((), _inverse(scale), dtype=torch.float32)
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


def unscale_and_clip(norm: Tensor, scale: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """Return the norm of the true gradients, and the factor that unscales and clips the scaled ones.

    Args:
        norm: 0-dim, of the scaled gradients. Where it is NaN nothing is clipped: all gradients would become
            NaN, and hide which of them were.
        scale: 0-dim float32.
        max_norm: the greatest norm.
    """
    if _is_at_hand(norm, scale) and isinstance(max_norm, (int, float)):
        by = _inverse(scale)
        true = _rounded(_read(norm) * by, norm)
        coefficient = max_norm / (true + 1e-6)
        factor = float32(by * coefficient) if coefficient < 1.0 else by
        return torch.full((), true, dtype=norm.dtype), torch.full((), factor, dtype=torch.float32)
    inverse = reciprocal(scale)
    true_norm = norm * inverse
    return true_norm, (inverse * clip_coefficient(true_norm, max_norm).nan_to_num(nan=1.0)).float()


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
