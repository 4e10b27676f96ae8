"""The few numbers that a step is made of, as tensors on the device of the scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from amp_core.states.loss_scale import float32

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
    plain = [type(n) is Tensor and n.is_cpu and n.dim() == 0 for n in numbers]  # faster than a generator
    return not is_tracing() and all(plain)


def _read(number: Tensor) -> float:
    return cast("float", number.tolist())  # no operation of torch's, and so none that is counted as a wait


def as_of_now(number: Tensor) -> Tensor | float:
    """Return what `number` is now, however it changes: a float where the host can read it, else a copy."""
    return _read(number) if _is_at_hand(number) else number.clone()


def _inverse(scale: float) -> float:
    return float32(1.0 / scale) if scale else math.copysign(math.inf, scale)


def _rounded(value: float, like: Tensor) -> float:
    return float32(value) if like.dtype is torch.float32 else value


def reciprocal(scale: Tensor) -> Tensor:
    """Return 1 / `scale`, through float64 where the device has it, as torch does. Nobody may write to it."""
    if _is_at_hand(scale):
        value = _read(scale)
        known = _inverses.get(value)
        return _keep_inverse(value) if known is None else known
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


_INVERSES = 64
_inverses: dict[float, Tensor] = {}
"""Those of up to `_INVERSES` scales: a scale is the same for thousands of steps."""


def _keep_inverse(scale: float) -> Tensor:
    inverse = torch.full((), _inverse(scale), dtype=torch.float32)
    if type(inverse) is Tensor and not inverse.is_inference():  # the mode of the moment passes
        if len(_inverses) == _INVERSES:
            _inverses.clear()
        _inverses[scale] = inverse
    return inverse


def unscale_and_clip(
    norm: Tensor, scale: Tensor, max_norm: float, *, as_divisor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the norm of the true gradients, and the factor that unscales and clips the scaled ones.

    Args:
        norm: 0-dim, of the scaled gradients. Where it is NaN nothing is clipped: all gradients would become
            NaN, and hide which of them were.
        scale: 0-dim float32.
        max_norm: the greatest norm.
        as_divisor: return the reciprocal of the factor, for optimizers that divide.
    """
    if _is_at_hand(norm, scale) and isinstance(max_norm, (int, float)):
        by, inverse = _read(scale), _inverse(_read(scale))
        true = _rounded(_read(norm) * inverse, norm)
        share = max_norm / (true + 1e-6)
        share = share if share < 1.0 else 1.0
        factor = (by / share if share else math.inf) if as_divisor else inverse * share
        return torch.full((), true, dtype=norm.dtype), torch.full((), float32(factor), dtype=torch.float32)
    inverses = reciprocal(scale)
    true_norm = norm * inverses
    shares = _clip_coefficient(true_norm, max_norm).nan_to_num(nan=1.0)
    return true_norm, (scale / shares if as_divisor else inverses * shares).float()


def _clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that brings `norm` down to `max_norm`, at most 1 (torch/nn/utils/clip_grad.py)."""
    return (norm + 1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)


def any_of(flags: Sequence[Tensor]) -> Tensor:
    """Return a flag that is 1.0 if any of `flags`, all on one device, is, else 0.0; it may be one of them."""
    if len(flags) == 1:
        return flags[0]
    if _is_at_hand(*flags):
        return max(flags, key=_read)
    return torch.stack([flag.reshape(()) for flag in flags]).amax(0)


def combine(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return, on `device`, `any_of` flags that may be on others; without any, that nothing was found."""
    here = [flag.to(device, non_blocking=True) for flag in flags]
    return any_of(here) if here else zero(device)


def overflows(norm: Tensor, divisor: Tensor) -> Tensor | None:
    """Return 1.0 where `divisor` is so small that finite gradients of this norm leave float32 by it.

    Else 0.0, or None where the host sees that at once: the scale is hardly ever below 2.
    """
    if _is_at_hand(divisor) and _read(divisor) >= 2.0:
        return None
    # Less than half of the smallest normal number has no finite reciprocal.
    limit = (divisor - _TINY / 2) * _MAX
    return ((norm < limit).logical_not() & (limit != torch.inf)).float()


_TINY, _MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
