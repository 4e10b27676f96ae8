"""Scalar arithmetic of a step. The scalars are tensors on the device of the scale.

On the CPU, plain floats replace tensor operations: the host can read the memory, and Python is faster than
a dispatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_core.kernels.memory import on_host, read
from amp_core.states.loss_scale import float32

is_tracing = torch.compiler.is_dynamo_compiling


def zero(device: torch.device) -> Tensor:
    """Return a cleared overflow flag."""
    return torch.zeros((), dtype=torch.float32, device=device)


def snapshot(number: Tensor) -> Tensor | float:
    """Return the present value of `number`: a float if the host can read it, else a copy on the device."""
    return read(number) if on_host(number) else number.clone()


def inverse_of(scale: float) -> float:
    """Return 1 / `scale`, rounded to float32."""
    return float32(1.0 / scale) if scale else math.copysign(math.inf, scale)


def reciprocal(scale: Tensor) -> Tensor:
    """Return 1 / `scale` in float32, bit for bit as torch. The result may be cached: do not write to it."""
    if not on_host(scale):
        # torch goes through float64. float32 division is correctly rounded and gives the same bits.
        return scale.reciprocal()
    value = read(scale)
    known = _inverses.get(value)
    return _keep_inverse(value) if known is None else known


_INVERSES = 64
_inverses: dict[float, Tensor] = {}
"""Reciprocals of recent scales. A scale is in use for thousands of steps."""


def _keep_inverse(scale: float) -> Tensor:
    inverse = torch.full((), inverse_of(scale), dtype=torch.float32, device="cpu")
    if type(inverse) is Tensor and not inverse.is_inference():  # made in a mode that will end
        if len(_inverses) >= _INVERSES:
            _inverses.clear()
        _inverses[scale] = inverse
    return inverse


def unscale_and_clip(
    norm: Tensor, scale: Tensor, max_norm: float, *, as_divisor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the norm of the unscaled gradients, and the factor that unscales and clips the scaled ones.

    Args:
        norm: 0-dim, norm of the scaled gradients. If it is NaN, nothing is clipped: clipping would turn
            every gradient into NaN and hide which of them were bad.
        scale: 0-dim float32.
        max_norm: the largest norm allowed.
        as_divisor: return the reciprocal of the factor, for optimizers that divide.
    """
    inverses = reciprocal(scale)
    true_norm = norm * inverses
    shares = _clip_coefficient(true_norm, max_norm).nan_to_num(nan=1.0)
    return true_norm, (scale / shares if as_divisor else inverses * shares).float()


def clip_on_host(
    norm: float, scale: float, inverse: float, max_norm: float, *, as_divisor: bool
) -> tuple[float, float]:
    """Compute `unscale_and_clip` from floats; `inverse` is the reciprocal of `scale`."""
    true = norm * inverse
    share = max_norm / (true + 1e-6)
    share = share if share < 1.0 else 1.0
    if as_divisor:
        return true, scale / share if share else math.inf
    return true, inverse * share


def _clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that brings `norm` down to `max_norm`, at most 1 (torch/nn/utils/clip_grad.py)."""
    return (norm + 1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)


def any_of(flags: Sequence[Tensor]) -> Tensor:
    """Return 1.0 if any of `flags` is, else 0.0. They are on one device; the result may be one of them."""
    if len(flags) == 1:
        return flags[0]
    if on_host(*flags):
        return max(flags, key=read)
    return torch.stack([flag.reshape(()) for flag in flags]).amax(0)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`; the host waits only for what it is about to read in its own memory."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def combine(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return, on `device`, `any_of` flags from several devices; 0.0 if there are none."""
    if len(flags) == 1 and flags[0].device == device:
        return flags[0]
    here = [moved(flag, device) for flag in flags]
    return any_of(here) if here else zero(device)


def overflows(norm: Tensor, divisor: Tensor, *, wide: bool = False) -> Tensor | None:
    """Return 1.0 if finite gradients of this norm, divided by `divisor`, may overflow, else 0.0.

    An optimizer computes in float32, or in float64 if `wide`: if all its gradients are float64. Returns None
    if the host knows that they cannot, which is the usual case: scales below 1 are rare.
    """
    if on_host(divisor) and read(divisor) >= 1.0:
        return None
    largest = torch.finfo(torch.float64).max if wide else FLOAT32_MAX
    # Less than half of the smallest normal number has no finite reciprocal.
    limit = (divisor - FLOAT32_TINY / 2).to(norm.dtype) * largest
    return ((norm < limit).logical_not() & (divisor < 1.0)).float()


FLOAT32_TINY, FLOAT32_MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
