"""The reference kernels, over torch operations alone. They run on every device that torch knows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from amp_core._torch import internals as _torch
from amp_core.kernels.interface import GradStats, Kernels, ScaleTensors
from amp_core.states.loss_scale import Hysteresis, LossScaleSchedule

_BUCKET = 1 << 25
"""Elements of narrow gradients that are widened at a time: 128 MiB of float32."""


_WIDE = (torch.float64, torch.complex128)


class Portable(Kernels):
    """Right everywhere, and one launch per list where torch has multi-tensor operations for the device.

    Args:
        has_float64: whether the device computes in float64.
    """

    name = "portable"
    _has_float64 = True

    sums_are_fast = False
    """Whether the device sums squares in float64 faster than it finds a maximum."""

    def __init__(self, *, has_float64: bool = True) -> None:
        self._has_float64 = has_float64

    def cast(
        self,
        tensors: Sequence[Tensor],
        dtype: torch.dtype,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        targets = [torch.empty_like(t, dtype=dtype) for t in tensors] if out is None else list(out)
        _check_shapes(tensors, targets)
        if _torch.functorch_is_at_work() or any([t.is_neg() or t.is_conj() for t in targets]):  # noqa: C419
            for target, tensor in zip(targets, tensors, strict=True):
                target.detach().copy_(tensor.detach())
        elif tensors:
            pairs = zip(tensors, targets, strict=True)
            sources = [_with_spare_bits(t.detach(), target.dtype) for t, target in pairs]
            _torch.foreach_copy_([t.detach() for t in targets], sources)
        return targets

    def grad_stats(self, grads: Sequence[Tensor], norm_type: float = 2.0) -> GradStats:
        wide = any(g.dtype in _WIDE for g in grads)
        dtype = torch.float64 if wide else torch.float32
        if not grads:
            none, zero = torch.zeros(0, dtype=dtype, device="cpu"), torch.zeros((), dtype=dtype, device="cpu")
            return GradStats(zero, none, none.clone(), zero.clone())
        order = math.inf if math.isinf(norm_type) else norm_type
        real = [_real(g.detach()) for g in grads]
        norms = torch.stack(self._norms([self._moduli(g, order) for g in grads], order))
        # One read tells both, unless a sum over finite elements can leave float64.
        tells = math.isinf(order) or (not wide and 1.0 <= order <= 7.0 and self._has_float64)
        bad = (~torch.isfinite(norms if tells else torch.stack(self._bounds(real)))).float()
        total = torch.linalg.vector_norm(norms, order)
        return GradStats(total.to(dtype), norms.to(dtype), bad, bad.amax())

    def multiply_(self, grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
        with torch.no_grad():
            for bucket in _buckets(grads):
                _multiply_(bucket, factor.reshape(()))
                if found_inf is not None:
                    # No product of an inf or a NaN is finite: one check tells of before and after.
                    bad = ~torch.isfinite(torch.stack(self._bounds(bucket))).all()
                    found_inf.masked_fill_(bad, 1.0)

    def update_scale_(self, state: ScaleTensors, found_inf: Tensor, schedule: LossScaleSchedule) -> None:
        """Both outcomes are computed and one is chosen on the device, so that nothing waits."""
        scale, tracker, left = state.scale, state.growth_tracker, state.hysteresis_left
        overflow = found_inf.reshape(()) > 0
        spent = left - 1
        forgiven = spent > 0
        lowered = self._product(scale, schedule.backoff_factor).clamp(min=schedule.min_scale)
        lowered = torch.where(forgiven, scale, torch.minimum(scale, lowered))
        grown = self._product(scale, schedule.growth_factor)
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

    def _moduli(self, grad: Tensor, order: float) -> Tensor:
        """Return real numbers with the norm of `grad`; for order 2 its own parts, without a copy."""
        grad = grad.detach()
        if not grad.is_complex() or order == 2.0:
            return _real(grad)
        return (grad.to(torch.complex128) if self._has_float64 else grad).abs()

    def _norms(self, tensors: list[Tensor], order: float) -> list[Tensor]:
        """Return the norm of each tensor: float64, which holds every power of a float32 that a norm needs."""
        if self._has_float64:
            return _norm_each(tensors, order, torch.float64)
        # Without float64, relative to the largest element, so that no power overflows.
        tensors = [t if t.numel() else t.new_zeros(1) for t in tensors]
        peaks = [p.float() for p in _norm_each(tensors, math.inf, None)]
        units = [torch.where((p > 0) & torch.isfinite(p), p, torch.ones_like(p)) for p in peaks]
        return [
            torch.linalg.vector_norm(t.float() / u, order) * u for t, u in zip(tensors, units, strict=True)
        ]

    def _bounds(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return for each real tensor a number that is finite exactly where all its elements are."""
        if self.sums_are_fast and not any(t.dtype is torch.float64 for t in tensors):
            return _norm_each(tensors, 2.0, torch.float64)  # which holds every square of a float32
        return _norm_each(tensors, math.inf, None)

    def _product(self, scale: Tensor, factor: float) -> Tensor:
        # torch's kernel multiplies in float64.
        wide = scale.double() if self._has_float64 else scale
        return (wide * factor).float()


def _check_shapes(tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for i, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
        if tensor.shape != target.shape:
            raise ValueError(
                f"out[{i}] has shape {tuple(target.shape)}, but the tensor to cast into it has "
                f"{tuple(tensor.shape)}. Nothing was written; pass an `out` of the shapes of `tensors`."
            )


def _with_spare_bits(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what torch rounds to `dtype` as if in one step: it takes float64 through float32.

    A float32 that was rounded to odd has bits to spare, and the last says whether anything was cut off.
    """
    if tensor.dtype is not torch.float64 or dtype.itemsize > 2:
        return tensor
    nearest = tensor.float()
    back = nearest.double()
    bits = nearest.view(torch.int32) - (back.abs() > tensor.abs()).int()
    return (bits | (back != tensor).int()).view(torch.float32)


def _real(tensor: Tensor) -> Tensor:
    """Return the parts of a complex tensor, in its own memory, as one real tensor.

    Lazy signs are dropped: neither norms nor products in place depend on them.
    """
    # Dynamo cannot trace the question, and has resolved lazy signs.
    if not torch.compiler.is_dynamo_compiling() and tensor.is_neg():
        tensor = _torch.neg_view(tensor)
    if not tensor.is_complex():
        return tensor
    # The parts of a lazily conjugated tensor differ from its memory in signs alone.
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)


def _norm_each(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the norms in the order of `tensors`; one launch for each of their dtypes."""
    places: dict[torch.dtype, list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        places[tensor.dtype].append(i)
    norms: dict[int, Tensor] = {}
    for where in places.values():
        full = [tensors[i] if tensors[i].numel() else tensors[i].new_zeros(1) for i in where]
        norms.update(zip(where, _torch.foreach_norm(full, order, dtype=dtype), strict=True))
    return [norms[i] for i in range(len(tensors))]


def _multiply_(bucket: list[Tensor], factor: Tensor) -> None:
    dtype = bucket[0].dtype
    if dtype in (torch.float32, torch.float64):
        _torch.foreach_mul_(bucket, factor.to(dtype))
        return
    # The factor itself would be rounded to the narrow dtype.
    wide = [torch.empty_like(g, dtype=torch.float32) for g in bucket]
    _torch.foreach_copy_(wide, bucket)
    _torch.foreach_mul_(wide, factor.float())
    _torch.foreach_copy_(bucket, wide)


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield real views of `grads`, each bucket of one dtype; bounded where a wide copy is to be made."""
    groups: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for grad in grads:
        real = _real(grad.detach())
        groups[real.dtype].append(real)
    for dtype, group in groups.items():
        bucket: list[Tensor] = []
        for grad in group:
            if bucket and dtype.itemsize < 4 and sum(g.numel() for g in bucket) + grad.numel() > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(grad)
        yield bucket
