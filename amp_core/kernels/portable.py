"""The reference kernels, built only on torch operations. They run on every device in torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from amp_core._torch.autocast import autocast_known, switched_off
from amp_core._torch.steps import (
    foreach_copy_,
    foreach_div,
    foreach_mul_,
    foreach_norm,
    is_alias_of,
    neg_view,
)
from amp_core._torch.tracing import functorch_is_at_work, is_compiling
from amp_core.kernels.interface import GradStats, Kernels, ScaleTensors, as_int32, check_shapes
from amp_core.states.loss_scale import Hysteresis, LossScaleSchedule

_BUCKET = 1 << 25
"""Number of elements of narrow gradients to widen at a time: 128 MiB of float32."""

_LARGEST = torch.finfo(torch.float32).max
_WIDE = (torch.float64, torch.complex128)


class Portable(Kernels):
    """Kernels for every device, with one launch per list if torch has multi-tensor operations for it.

    Args:
        has_float64: whether the device supports float64.
    """

    name = "portable"
    _has_float64 = True

    sums_are_fast = False
    """Whether the device sums squares in float64 faster than it computes a maximum."""

    def __init__(self, *, has_float64: bool = True) -> None:
        self._has_float64 = has_float64

    def cast(
        self,
        tensors: Sequence[Tensor],
        dtype: torch.dtype,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        targets = [torch.empty_like(t, dtype=dtype) for t in tensors] if out is None else list(out)
        check_shapes(tensors, targets, "out", "tensors")
        pairs = zip(tensors, targets, strict=True)
        sources = [_with_spare_bits(t.detach(), target.dtype) for t, target in pairs]
        if functorch_is_at_work() or any([t.is_neg() or t.is_conj() for t in targets]):
            for target, source in zip(targets, sources, strict=True):
                # Copied from another dtype, torch would lose the sign of a lazily negated target.
                target.detach().copy_(source.to(target.dtype))
        elif tensors:
            foreach_copy_([t.detach() for t in targets], sources)
        return targets

    def grad_stats(self, grads: Sequence[Tensor], norm_type: float = 2.0) -> GradStats:
        wide = any(g.dtype in _WIDE for g in grads)
        dtype = torch.float64 if wide else torch.float32
        if not grads:
            none, zero = torch.zeros(0, dtype=dtype, device="cpu"), torch.zeros((), dtype=dtype, device="cpu")
            return GradStats(zero, none, none.clone(), zero.clone())
        with _outside_autocast(grads[0].device.type):
            return self._grad_stats(grads, math.inf if math.isinf(norm_type) else norm_type, dtype)

    def _grad_stats(self, grads: Sequence[Tensor], order: float, dtype: torch.dtype) -> GradStats:
        real = [_real(_without_signs(g.detach())) for g in grads]
        norms = torch.stack(self._norms([self._moduli(g, order) for g in grads], order))
        # One pass gives both, unless a sum over finite elements, or the modulus of one, can overflow.
        if math.isinf(order):
            shows_nonfinite = not any(g.is_complex() and not self._widens(g) for g in grads)
        else:
            shows_nonfinite = dtype is torch.float32 and 1.0 <= order <= 7.0 and self._has_float64
        bad = (~finite(norms if shows_nonfinite else torch.stack(self._bounds(real)))).float()
        total = self._norms([norms], order)[0]
        return GradStats(total.to(dtype), norms.to(dtype), bad, bad.amax())

    def multiply_(self, grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
        with torch.no_grad(), _outside_autocast(factor.device.type):
            memory = [_without_signs(g.detach()) for g in grads]
            parts = [_real(m) for m in memory]
            for bucket in _buckets(parts):
                _multiply_(bucket, factor.reshape(()))
                if found_inf is not None:
                    # No product with inf or NaN is finite, so one check covers before and after.
                    bad = ~finite(torch.stack(self._bounds(bucket))).all()
                    found_inf.masked_fill_(bad, 1.0)
            for whole, part in zip(memory, parts, strict=True):
                if part is not whole and not _is_view(part, whole):
                    whole.copy_(torch.view_as_complex(part))

    def update_scale_(self, state: ScaleTensors, found_inf: Tensor, schedule: LossScaleSchedule) -> None:
        """Compute both outcomes and select one on the device, without synchronization."""
        scale, tracker, left = state.scale, state.growth_tracker, state.hysteresis_left
        overflow = found_inf.reshape(()) > 0
        spent = left - 1
        forgiven = spent > 0
        lowered = self._product(scale, schedule.backoff_factor).clamp(min=schedule.min_scale)
        lowered = torch.where(forgiven, scale, torch.minimum(scale, lowered))
        grown = self._product(scale, schedule.growth_factor)
        capped = torch.maximum(scale, grown.clamp(max=min(schedule.max_scale, _LARGEST)))
        grown = torch.where(torch.isinf(grown), scale, capped)
        due = tracker >= as_int32(schedule.growth_interval) - 1
        full = torch.full_like(left, as_int32(schedule.hysteresis))
        refill = full if schedule.hysteresis_kind is not Hysteresis.BUDGET else left
        reset = full if schedule.hysteresis_kind is Hysteresis.EVERY else spent.clamp(min=0)
        new_left = torch.where(overflow, torch.where(forgiven, spent, reset), torch.where(due, full, refill))
        new_scale = torch.where(overflow, lowered, torch.where(due, grown, scale))
        tracker.copy_(torch.where(overflow | due, torch.zeros_like(tracker), tracker + 1))
        scale.copy_(new_scale)
        left.copy_(new_left)

    def _moduli(self, grad: Tensor, order: float) -> Tensor:
        """Return real numbers with the same norm as `grad`; for order 2, a view of its parts."""
        grad = grad.detach()
        if not grad.is_complex() or order == 2.0:
            return _real(_without_signs(grad))
        return (grad.to(torch.complex128) if self._widens(grad) else grad).abs()

    def _widens(self, grad: Tensor) -> bool:
        """Whether the moduli of a complex `grad` are computed in a dtype in which none overflows."""
        return self._has_float64 and grad.dtype is not torch.complex128

    def _norms(self, tensors: list[Tensor], order: float) -> list[Tensor]:
        """Return the norm of each tensor in float64, which can represent all required powers of a float32."""
        if self._has_float64:
            return _norm_each(tensors, order, torch.float64)
        # Without float64, divide by the largest element so that no power overflows.
        tensors = [t if t.numel() else t.new_zeros(1) for t in tensors]
        peaks = torch.stack([p.float() for p in _norm_each(tensors, math.inf, None)])
        units = torch.where((peaks > 0) & finite(peaks), peaks, torch.ones_like(peaks))
        ratios = foreach_div([t.float() for t in tensors], units.unbind())
        return list((torch.stack(_norm_each(ratios, order, None)) * units).unbind())

    def _bounds(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return for each real tensor a number that is finite if and only if all its elements are."""
        if self.sums_are_fast and not any(t.dtype is torch.float64 for t in tensors):
            return _norm_each(tensors, 2.0, torch.float64)  # can represent every square of a float32
        return _norm_each(tensors, math.inf, None)

    def _product(self, scale: Tensor, factor: float) -> Tensor:
        # Like torch's kernel, multiply in float64.
        wide = scale.double() if self._has_float64 else scale
        return (wide * factor).float()


def _outside_autocast(device_type: str) -> AbstractContextManager[None]:
    """Turn autocast off, which casts norms and refuses to stack float64 with another dtype."""
    known = not is_compiling() and autocast_known(device_type)
    return switched_off(device_type) if known and torch.is_autocast_enabled(device_type) else nullcontext()


def _with_spare_bits(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 to odd in float32, so that torch's conversion through float32 rounds only once.

    A float32 has spare bits for this; its last bit records whether anything was cut off.
    """
    if tensor.dtype is not torch.float64 or dtype.itemsize > 2:
        return tensor
    nearest = tensor.float()
    back = nearest.double()
    beyond = ((back > tensor) & (back > 0)) | ((back < tensor) & (back < 0))
    bits = nearest.view(torch.int32) - beyond.int()
    return (bits | (back != tensor).int()).view(torch.float32)


def finite(tensor: Tensor) -> Tensor:
    """Return ``torch.isfinite(tensor)`` without its `abs`, which some devices have for float32 alone."""
    return (tensor - tensor) == 0


def _without_signs(tensor: Tensor) -> Tensor:
    """Return the memory of a lazily negated or conjugated tensor.

    Neither norms nor in-place products depend on the signs of the parts.
    """
    # Dynamo cannot trace is_neg(), but resolves lazy signs itself.
    if not torch.compiler.is_dynamo_compiling() and tensor.is_neg():
        tensor = neg_view(tensor)
    return tensor.conj() if tensor.is_complex() and tensor.is_conj() else tensor


def _real(tensor: Tensor) -> Tensor:
    """Return a real tensor as it is, and a complex one as its parts."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _is_view(part: Tensor, whole: Tensor) -> bool:
    """Whether what is written to `part` is in `whole`: devices without complex views give a copy."""
    return torch.compiler.is_dynamo_compiling() or is_alias_of(part, whole)


def _norm_each(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the norms in the order of `tensors`, with one launch per dtype."""
    places: dict[torch.dtype, list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        places[tensor.dtype].append(i)
    norms: dict[int, Tensor] = {}
    for where in places.values():
        full = [tensors[i] if tensors[i].numel() else tensors[i].new_zeros(1) for i in where]
        norms.update(zip(where, foreach_norm(full, order, dtype=dtype), strict=True))
    return [norms[i] for i in range(len(tensors))]


def _multiply_(bucket: list[Tensor], factor: Tensor) -> None:
    dtype = bucket[0].dtype
    if dtype in (torch.float32, torch.float64):
        foreach_mul_(bucket, factor.to(dtype))
        return
    # A direct product would round the factor to the narrow dtype.
    wide = [torch.empty_like(g, dtype=torch.float32) for g in bucket]
    foreach_copy_(wide, bucket)
    foreach_mul_(wide, factor.float())
    foreach_copy_(bucket, wide)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield real tensors in buckets of one dtype, limited in size if they need a wide copy."""
    groups: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype].append(tensor)
    for dtype, group in groups.items():
        bucket: list[Tensor] = []
        for grad in group:
            if bucket and dtype.itemsize < 4 and sum(g.numel() for g in bucket) + grad.numel() > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(grad)
        yield bucket
