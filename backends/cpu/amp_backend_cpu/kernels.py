"""The CPU's kernels: compiled ones if the library was built, else the portable ones."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from amp_backend_cpu import library as _library
from amp_backend_cpu.storage import StorageKernels
from amp_core.kernels import GradStats, Kernels, Portable, ScaleTensors
from amp_core.kernels.interface import as_int32
from amp_core.kernels.memory import are_numbers, are_plain, are_real
from amp_core.states.loss_scale import Hysteresis, LossScaleSchedule

if TYPE_CHECKING:  # few programs have recipes
    from amp_core.formats import Quantization, Quantized

_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_CPU = torch.device("cpu")
_LARGE = 1 << 22  # elements: above this, streaming stores matter
_STATE = [torch.float32, torch.int32, torch.int32, torch.float32]
_ADDRESS = "L" if array("L").itemsize == 8 else "Q"  # filling "L" takes half the time
_KINDS = (Hysteresis.BUDGET, Hysteresis.CONSECUTIVE, Hysteresis.EVERY)


class Compiled(StorageKernels):
    """Plain C with OpenMP, for the instruction set that torch uses.

    It handles dense tensors. Calls with any other tensor (complex, strided, fake, of a subclass), another
    norm order, or a cast to the same dtype use the portable kernels.
    """

    name = "compiled"
    sums_are_fast = True

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._tuning = _library.Tuning(library)

    @property
    def reason(self) -> str:  # type: ignore[override]  # measured on first use
        return f"{_library.instruction_set(self._library)}, OpenMP; {self._tuning}"

    def layout(self, tensors: Sequence[Tensor]) -> object:
        return _Layout(tensors)

    def prepare(self, tensors: Sequence[Tensor], layout: object = None) -> Sequence[Tensor]:
        return _Prepared(tensors, layout if isinstance(layout, _Layout) else _Layout(tensors))

    def grad_stats(self, grads: Sequence[Tensor], norm_type: float = 2.0) -> GradStats:
        table = _table_of(grads) if norm_type == 2.0 else None
        if table is None:
            return super().grad_stats(grads, norm_type)
        dtype = torch.float64 if table.wide else torch.float32
        norms, norm = _empty(len(grads), dtype), _empty((), dtype)
        nonfinite, found_inf = _empty(len(grads), torch.float32), _empty((), torch.float32)
        outputs = [t.data_ptr() for t in (norms, nonfinite, norm, found_inf)]
        _check(self._library.amp_grad_stats(*table.arguments, *outputs, table.wide, table.threads()))
        return GradStats(norm, norms, nonfinite, found_inf)

    def multiply_(self, grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
        flags = [factor] if found_inf is None else [factor, found_inf]
        table = _table_of(grads) if are_numbers(flags, _CPU) else None
        if table is None:
            return super().multiply_(grads, factor, found_inf)
        flag = None if found_inf is None else found_inf.data_ptr()
        _check(self._library.amp_multiply(*table.arguments, factor.data_ptr(), flag, table.threads()))
        increment_version([*grads, *flags[1:]])
        return None

    def cast(
        self, tensors: Sequence[Tensor], dtype: torch.dtype, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        targets = [torch.empty_like(t, dtype=dtype) for t in tensors] if out is None else list(out)
        source, target = _table_of(tensors), _table_of(targets)
        if source is None or target is None or not _to_others(tensors, targets):
            return super().cast(tensors, dtype, targets)
        if not self._tuning.settled and source.elements >= _LARGE:
            self._tuning.settle()
        _, to, _, codes = target.arguments
        _check(self._library.amp_cast(*source.arguments, to, codes, source.threads()))
        increment_version(targets)
        return targets

    def add_(self, totals: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        source, target = _table_of(grads), _table_of(totals)
        if source is None or target is None or not _halves_to_float32(totals, grads):
            return super().add_(totals, grads)
        _check(self._library.amp_add(*source.arguments, target.arguments[1], source.threads()))
        increment_version(totals)
        return None

    def quantize(
        self,
        tensor: Tensor,
        quantization: Quantization,
        dim: int = -1,
        *,
        seed: int | Tensor | None = None,
        amax: Tensor | None = None,
        packed: bool = False,
    ) -> Quantized:
        from amp_backend_cpu.quantizing import CompiledPasses, takes
        from amp_core.formats.quantize import quantize_by

        if not takes(tensor, dim):
            return super().quantize(tensor, quantization, dim, seed=seed, amax=amax, packed=packed)
        passes = CompiledPasses(self._library)
        return quantize_by(passes, tensor, quantization, dim, seed=seed, amax=amax, packed=packed)

    def update_scale_(self, state: ScaleTensors, found_inf: Tensor, schedule: LossScaleSchedule) -> None:
        tensors = [state.scale, state.growth_tracker, state.hysteresis_left, found_inf]
        if [t.dtype for t in tensors] != _STATE or not are_real(tensors, _CPU):
            return super().update_scale_(state, found_inf, schedule)
        self._library.amp_update_scale(
            *[t.data_ptr() for t in tensors],
            schedule.growth_factor,
            schedule.backoff_factor,
            as_int32(schedule.growth_interval),
            schedule.min_scale,
            schedule.max_scale,
            as_int32(schedule.hysteresis),
            _KINDS.index(schedule.hysteresis_kind),
        )
        increment_version(tensors[:3])
        return None


def _empty(shape: int | tuple[()], dtype: torch.dtype) -> Tensor:
    # Pass the device explicitly because the default device may differ.
    return torch.empty(shape, dtype=dtype, device=_CPU)


def _to_others(tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    """Return whether each cast changes the dtype and keeps the shape and layout."""
    pairs = list(zip(tensors, targets, strict=True))
    return all(t.shape == o.shape and t.stride() == o.stride() and t.dtype is not o.dtype for t, o in pairs)


def _halves_to_float32(totals: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Return whether 16-bit `grads` are added to float32 totals of the same layout."""
    same = all(t.shape == g.shape and t.stride() == g.stride() for t, g in zip(totals, grads, strict=True))
    return same and {t.dtype for t in totals} == {torch.float32} and all(g.itemsize == 2 for g in grads)


class _Layout:
    """The library's arguments for a list of tensors, except addresses.

    Computing them takes most of the time of a call on small tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.fits = bool(tensors) and are_plain(tensors, _CPU, _CODES.keys())
        """Whether the library supports such tensors; if not, no other attribute is set."""
        if self.fits:
            self.sizes = array("q", [t.numel() for t in tensors])
            self.codes = array("i", [_CODES[t.dtype] for t in tensors])
            self.addresses = [a.buffer_info()[0] for a in (self.sizes, self.codes)]
            self.elements = sum(self.sizes)
            self.wide = _CODES[torch.float64] in self.codes


class _Table:
    """The library's arguments for a list of tensors."""

    def __init__(self, tensors: Sequence[Tensor], layout: _Layout) -> None:
        self.elements = layout.elements
        self.wide = layout.wide
        addresses = array(_ADDRESS, list(map(Tensor.data_ptr, tensors)))
        self._owners = addresses, layout
        self._has_null = 0 in addresses
        self.arguments = (len(tensors), addresses.buffer_info()[0], *layout.addresses)

    def is_freed(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the memory of a nonempty tensor was freed."""
        return self._has_null and any(t.numel() and not t.data_ptr() for t in tensors)

    def threads(self) -> int:
        # Waking another thread takes as long as processing this many elements.
        return min(torch.get_num_threads(), self.elements // 2**17 + 1)


class _Prepared(list[Tensor]):
    """Tensors with their table, or ``None`` if the library does not support them."""

    def __init__(self, tensors: Sequence[Tensor], layout: _Layout) -> None:
        super().__init__(tensors)
        self.table = _read_table(tensors, layout)


def _table_of(tensors: Sequence[Tensor]) -> _Table | None:
    if isinstance(tensors, _Prepared):
        return tensors.table
    return _read_table(tensors, _Layout(tensors))


def _read_table(tensors: Sequence[Tensor], layout: _Layout) -> _Table | None:
    table = _Table(tensors, layout) if layout.fits else None
    return None if table is None or table.is_freed(tensors) else table


def _check(status: int) -> None:
    if status != 0:
        raise MemoryError("amp-core's compiled CPU kernels could not allocate memory for their work lists.")


@functools.cache
def load() -> Kernels:
    """Return the compiled kernels, or the portable ones with the reason."""
    try:
        return Compiled(_library.load())
    except _library.LibraryMissingError as error:
        kernels = Portable()
        kernels.sums_are_fast = True
        kernels.reason = str(error)
        return kernels
