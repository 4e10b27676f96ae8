"""Multi-tensor kernels in Triton, for every GPU with a Triton compiler."""

from __future__ import annotations

import math
import struct
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from amp_core.kernels import triton_norms
from amp_core.kernels import triton_programs as programs
from amp_core.kernels.interface import GradStats, ScaleTensors, as_int32
from amp_core.kernels.memory import are_numbers, are_plain, are_real
from amp_core.kernels.portable import Portable
from amp_core.kernels.triton_tables import Rows, launch, on, rows_of
from amp_core.states.loss_scale import Hysteresis, LossScaleSchedule

_DTYPES: dict[Any, Any] = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_GRADIENTS = {*_DTYPES, torch.complex64, torch.complex128}
_STATE = [torch.float32, torch.int32, torch.int32, torch.float32]
_ORDERS = {1.0: 1, 2.0: 2, math.inf: 0}
_GENERAL = -1


class Triton(Portable):
    """One launch per dtype, or per pair of dtypes to cast between.

    It handles dense tensors on one device, and complex ones as their parts. Calls with any other tensor
    (strided, lazily negated or conjugated, fake, of a subclass, 8-bit) and norms of complex tensors other
    than the 2-norm use the portable kernels.

    Args:
        device_type: the device type of the tensors.
        has_float64: whether its devices support float64.
    """

    name = "triton"

    def __init__(self, device_type: str, *, has_float64: bool = True) -> None:
        super().__init__(has_float64=has_float64)
        self.reason = f"Triton {triton.__version__}, one launch per dtype"
        self._device_type = device_type

    def layout(self, tensors: Sequence[Tensor]) -> object:
        return _Layout(tensors, self._device_type)

    def prepare(self, tensors: Sequence[Tensor], layout: object = None) -> Sequence[Tensor]:
        known = layout if isinstance(layout, _Layout) else _Layout(tensors, self._device_type)
        return _Prepared(tensors, known)

    def grad_stats(self, grads: Sequence[Tensor], norm_type: float = 2.0) -> GradStats:
        table = self._table_of(grads)
        if table is None or (table.layout.complex and norm_type != 2.0):
            return super().grad_stats(grads, norm_type)
        with on(table.layout.device):
            return _grad_stats(table, norm_type)

    def multiply_(self, grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
        flags = [factor] if found_inf is None else [factor, found_inf]
        table = self._table_of(grads)
        if table is None or not are_numbers(flags, table.layout.device):
            return super().multiply_(grads, factor, found_inf)
        with on(table.layout.device):
            for group in table.rows.groups:
                arguments = (*table.arguments(), group.first, factor, flags[-1], _DTYPES[group.kind])
                last = (_wide(group.kind), len(flags) == 2, programs.BLOCK)
                launch(programs.scale_rows, group.count, *arguments, *last)
        increment_version(grads)
        increment_version(flags[1:])
        return None

    def cast(
        self, tensors: Sequence[Tensor], dtype: torch.dtype, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        targets = [torch.empty_like(t, dtype=dtype) for t in tensors] if out is None else list(out)
        halves = not {t.dtype for t in targets}.isdisjoint((torch.float16, torch.bfloat16))
        twice = halves and any(t.dtype is torch.float64 for t in tensors)  # Triton rounds to float32 first
        if twice or not _are_pairs(tensors, targets, self._device_type):
            return super().cast(tensors, dtype, targets)
        _move(tensors, targets, add=False)
        increment_version(targets)
        return targets

    def add_(self, totals: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        if not _are_pairs(grads, totals, self._device_type):
            return super().add_(totals, grads)
        _move(grads, totals, add=True)
        increment_version(totals)
        return None

    def update_scale_(self, state: ScaleTensors, found_inf: Tensor, schedule: LossScaleSchedule) -> None:
        tensors = [state.scale, state.growth_tracker, state.hysteresis_left, found_inf]
        device = state.scale.device
        known = device.type == self._device_type and [t.dtype for t in tensors] == _STATE
        if not known or not are_real(tensors, device) or not self._has_float64:
            return super().update_scale_(state, found_inf, schedule)
        with on(device):
            launch(
                programs.update_scale,
                1,
                *tensors,
                *[_bits(x) for x in (schedule.growth_factor, schedule.backoff_factor)],
                *[_bits(x) for x in (schedule.min_scale, schedule.max_scale)],
                as_int32(schedule.growth_interval),
                as_int32(schedule.hysteresis),
                schedule.hysteresis_kind is Hysteresis.BUDGET,
                schedule.hysteresis_kind is Hysteresis.EVERY,
            )
        increment_version(tensors[:3])
        return None

    def _table_of(self, tensors: Sequence[Tensor]) -> _Table | None:
        if isinstance(tensors, _Prepared):
            return tensors.table
        layout = _Layout(tensors, self._device_type)
        return _Table(tensors, layout) if layout.fits else None


class _Layout:
    """The dtypes and sizes of a list of tensors, which stay the same across steps."""

    def __init__(self, tensors: Sequence[Tensor], device_type: str) -> None:
        self.fits = bool(tensors) and tensors[0].device.type == device_type
        self.fits = self.fits and are_plain(tensors, tensors[0].device, _GRADIENTS)
        """Whether the programs support such tensors; if not, no other attribute is set."""
        if self.fits:
            self.device = tensors[0].device
            self.complex = any([t.is_complex() for t in tensors])
            self.wide = any([t.dtype.to_real() is torch.float64 for t in tensors])
            self._kinds = tuple([t.dtype.to_real() for t in tensors])
            self._sizes = tuple([t.numel() * (2 if t.is_complex() else 1) for t in tensors])
            self._rows: Rows | None = None

    def rows(self) -> Rows:
        """Return the division of such tensors into rows."""
        if self._rows is not None:
            return self._rows
        rows = rows_of(self._kinds, self._sizes, self.device)
        self._rows = None if rows.captured else rows
        return rows


class _Table:
    """The addresses of tensors, on their device."""

    def __init__(self, tensors: Sequence[Tensor], layout: _Layout) -> None:
        self.layout = layout
        with on(layout.device):
            self.rows = layout.rows()
            self.addresses = self.rows.addresses(tensors)

    def arguments(self) -> tuple[Tensor, ...]:
        """Return the first arguments of programs that process rows."""
        return self.addresses, self.rows.sizes, self.rows.tensor, self.rows.start


class _Prepared(list[Tensor]):
    """Tensors with their table, or ``None`` if the programs do not support them."""

    def __init__(self, tensors: Sequence[Tensor], layout: _Layout) -> None:
        super().__init__(tensors)
        self.table = _Table(tensors, layout) if layout.fits else None


def _grad_stats(table: _Table, norm_type: float) -> GradStats:
    rows, device = table.rows, table.layout.device
    count = len(table.addresses)
    dtype = torch.float64 if table.layout.wide else torch.float32
    norms, norm = torch.empty(count, dtype=dtype, device=device), torch.empty((), dtype=dtype, device=device)
    nonfinite = torch.empty(count, dtype=torch.float32, device=device)
    found_inf = torch.empty((), dtype=torch.float32, device=device)
    parts = (rows.count + count + 3) // 4 * 4  # so that the second also starts at a multiple of 16 bytes
    units, sums = torch.empty((2, parts), dtype=dtype, device=device).unbind()
    order = _ORDERS.get(norm_type, _GENERAL)
    power = norm_type if order == _GENERAL else 0.0
    for group in rows.groups:
        arguments = (*table.arguments(), group.first, units, sums, power, _DTYPES[group.kind], order)
        launch(triton_norms.measure_rows, group.count, *arguments, _wide(group.kind), programs.BLOCK)
    last = (power, order, _DTYPES[dtype], triton_norms.PARTS)
    tensors = (rows.first, rows.end, units, sums, rows.count, norms, nonfinite)
    launch(triton_norms.measure_tensors, count, *tensors, *last)
    whole = (units, sums, rows.count, rows.count + count, norm, found_inf)
    launch(triton_norms.measure_total, 1, *whole, *last)
    return GradStats(norm, norms, nonfinite, found_inf)


def _move(sources: Sequence[Tensor], targets: Sequence[Tensor], *, add: bool) -> None:
    """Write `sources` to `targets`, or add them there, with one launch for each pair of dtypes."""
    device = sources[0].device
    pairs: tuple[Hashable, ...] = tuple([(t.dtype, o.dtype) for t, o in zip(sources, targets, strict=True)])
    with on(device):
        rows = rows_of(pairs, tuple([t.numel() for t in sources]), device)
        tables = (rows.addresses(sources), rows.addresses(targets), rows.sizes, rows.tensor, rows.start)
        for group in rows.groups:
            source, target = group.kind
            dtypes = (_DTYPES[source], _DTYPES[target], _wide(target))
            launch(programs.move_rows, group.count, *tables, group.first, *dtypes, add, programs.BLOCK)


def _are_pairs(tensors: Sequence[Tensor], targets: Sequence[Tensor], device_type: str) -> bool:
    """Return whether all tensors are dense on one device and each target matches its tensor's layout."""
    if not tensors or tensors[0].device.type != device_type or len(tensors) != len(targets):
        return False
    if not are_plain([*tensors, *targets], tensors[0].device, _DTYPES.keys()):
        return False
    pairs = zip(tensors, targets, strict=True)
    return all([t.shape == o.shape and t.stride() == o.stride() for t, o in pairs])


def _wide(dtype: Any) -> Any:
    return tl.float64 if dtype is torch.float64 else tl.float32


def _bits(value: float) -> int:
    return int(struct.unpack("q", struct.pack("d", value))[0])
