"""The reference kernels, over torch operations alone. They run on every device that torch knows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_core import _torch
from amp_core.kernels.interface import Kernels, Measurement, ScaleTensors
from amp_core.state import Hysteresis, Schedule


class Portable(Kernels):
    """Slow where a device has better, right everywhere."""

    name = "portable"

    def cast(
        self,
        tensors: Sequence[Tensor],
        dtype: torch.dtype,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        targets = [torch.empty_like(t, dtype=dtype) for t in tensors] if out is None else list(out)
        for target, tensor in zip(targets, tensors, strict=True):
            target.detach().copy_(tensor.detach())
        return targets

    def measure(self, grads: Sequence[Tensor], norm_type: float = 2.0) -> Measurement:
        device = grads[0].device if grads else None
        wide = any(_real_dtype(g) is torch.float64 for g in grads)
        dtype = torch.float64 if wide else torch.float32
        if not grads:
            zero = torch.zeros((), dtype=dtype, device=device)
            none = torch.zeros(0, dtype=dtype, device=device)
            return Measurement(zero, none, none.float(), zero.float().clone())
        norms = torch.stack([_norm(g, norm_type) for g in grads])
        bad = torch.stack([(~torch.isfinite(g.detach())).any() for g in grads]).float()
        total = torch.linalg.vector_norm(norms, norm_type)
        return Measurement(total.to(dtype), norms.to(dtype), bad, bad.max())

    def scale_(self, grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
        with torch.no_grad():
            for group in _by_dtype(grads).values():
                bad = [] if found_inf is None else [_any_nonfinite(g) for g in group]
                _multiply_(group, factor.reshape(()))
                if found_inf is not None:
                    bad += [_any_nonfinite(g) for g in group]
                    found_inf.masked_fill_(torch.stack(bad).any(), 1.0)

    def update_scale_(self, state: ScaleTensors, found_inf: Tensor, schedule: Schedule) -> None:
        """Both outcomes are computed and one is chosen on the device, so that nothing waits."""
        scale, tracker, left = state.scale, state.growth_tracker, state.hysteresis_left
        overflow = found_inf.reshape(()) > 0
        spent = left - 1
        forgiven = spent > 0
        lowered = _product(scale, schedule.backoff_factor).clamp(min=schedule.min_scale)
        lowered = torch.where(forgiven, scale, torch.minimum(scale, lowered))
        grown = _product(scale, schedule.growth_factor)
        capped = torch.maximum(scale, grown.clamp(max=schedule.max_scale))
        grown = torch.where(torch.isinf(grown), scale, capped)
        due = tracker + 1 >= schedule.growth_interval
        full = torch.full_like(left, schedule.hysteresis)
        refill = full if schedule.hysteresis_kind is not Hysteresis.BUDGET else left
        reset = full if schedule.hysteresis_kind is Hysteresis.EVERY else spent.clamp(min=0)
        new_left = torch.where(overflow, torch.where(forgiven, spent, reset), torch.where(due, full, refill))
        new_scale = torch.where(overflow, lowered, torch.where(due, grown, scale))
        tracker.copy_(torch.where(overflow | due, torch.zeros_like(tracker), tracker + 1))
        scale.copy_(new_scale)
        left.copy_(new_left)


def _real_dtype(tensor: Tensor) -> torch.dtype:
    return tensor.dtype.to_real()


def _norm(grad: Tensor, norm_type: float) -> Tensor:
    if grad.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=grad.device)
    # float64 holds every power of a float32 that a norm needs.
    real = torch.view_as_real(grad).norm(dim=-1) if grad.is_complex() else grad
    order = math.inf if math.isinf(norm_type) else norm_type
    norm: Tensor = torch.linalg.vector_norm(real.detach(), order, dtype=torch.float64)
    return norm


def _multiply_(group: list[Tensor], factor: Tensor) -> None:
    real = [torch.view_as_real(g) if g.is_complex() else g for g in group]
    dtype = real[0].dtype
    if dtype in (torch.float32, torch.float64):
        _torch.foreach_mul_(real, factor.to(dtype))
    else:  # the factor itself would be rounded to the narrow dtype
        for grad in real:
            grad.copy_(grad.float() * factor)


def _product(scale: Tensor, factor: float) -> Tensor:
    # torch's kernel multiplies in float64; a device without it (mps) has float32 alone.
    wide = scale if scale.device.type == "mps" else scale.double()
    return (wide * factor).float()


def _any_nonfinite(grad: Tensor) -> Tensor:
    return (~torch.isfinite(grad)).any()


def _by_dtype(grads: Sequence[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for grad in grads:
        groups[grad.dtype].append(grad.detach())
    return groups
