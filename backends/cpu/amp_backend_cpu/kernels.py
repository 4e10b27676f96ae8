"""The CPU's kernels: compiled ones where the library was built, the portable ones elsewhere."""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from amp_core.common import environment as _env
from amp_core.kernels import GradStats, Kernels, Portable, ScaleTensors
from amp_core.kernels.memory import are_numbers, are_plain, are_real
from amp_core.states.loss_scale import Hysteresis, LossScaleSchedule

_ABI = 4
"""What `native/kernels.c` says of itself; a library from other sources must not be called."""

_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_CPU = torch.device("cpu")
_STATE = [torch.float32, torch.int32, torch.int32, torch.float32]
_ADDRESS = "L" if array("L").itemsize == 8 else "Q"  # the first is filled in half the time
_KINDS = (Hysteresis.BUDGET, Hysteresis.CONSECUTIVE, Hysteresis.EVERY)


class Compiled(Portable):
    """Plain C with OpenMP; the instruction set is chosen when the library is loaded.

    Takes plain tensors without gaps. A call with any other tensor (complex, strided, fake, of a
    subclass), another order of norm, or a cast that changes nothing, goes to the portable kernels whole.
    """

    name = "compiled"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.reason = f"{library.amp_instruction_set().decode()}, OpenMP"

    def layout(self, tensors: Sequence[Tensor]) -> object:
        return _Layout(tensors)

    def prepare(self, tensors: Sequence[Tensor], layout: object = None) -> Sequence[Tensor]:
        return _Prepared(tensors, layout if isinstance(layout, _Layout) else _Layout(tensors))

    def grad_stats(self, grads: Sequence[Tensor], norm_type: float = 2.0) -> GradStats:
        table = _table_of(grads) if norm_type == 2.0 else None
        if table is None:
            return super().grad_stats(grads, norm_type)
        dtype = torch.float64 if table.wide else torch.float32
        norms, norm = torch.empty(len(grads), dtype=dtype), torch.empty((), dtype=dtype)
        bad, found = torch.empty(len(grads), dtype=torch.float32), torch.empty((), dtype=torch.float32)
        outputs = [t.data_ptr() for t in (norms, bad, norm, found)]
        _check(self._library.amp_measure(*table.arguments, *outputs, table.wide, table.threads()))
        return GradStats(norm, norms, bad, found)

    def multiply_(self, grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
        flags = [factor] if found_inf is None else [factor, found_inf]
        table = _table_of(grads) if are_numbers(flags, _CPU) else None
        if table is None:
            return super().multiply_(grads, factor, found_inf)
        found = None if found_inf is None else found_inf.data_ptr()
        _check(self._library.amp_scale(*table.arguments, factor.data_ptr(), found, table.threads()))
        increment_version(grads)
        increment_version(flags[1:])
        return None

    def cast(
        self, tensors: Sequence[Tensor], dtype: torch.dtype, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        targets = [torch.empty_like(t, dtype=dtype) for t in tensors] if out is None else list(out)
        source, target = _table_of(tensors), _table_of(targets)
        if source is None or target is None or not _to_others(tensors, targets):
            return super().cast(tensors, dtype, targets)
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

    def update_scale_(self, state: ScaleTensors, found_inf: Tensor, schedule: LossScaleSchedule) -> None:
        tensors = [state.scale, state.growth_tracker, state.hysteresis_left, found_inf]
        if [t.dtype for t in tensors] != _STATE or not are_real(tensors, _CPU):
            return super().update_scale_(state, found_inf, schedule)
        self._library.amp_update_scale(
            *[t.data_ptr() for t in tensors],
            schedule.growth_factor,
            schedule.backoff_factor,
            schedule.growth_interval,
            schedule.min_scale,
            schedule.max_scale,
            schedule.hysteresis,
            _KINDS.index(schedule.hysteresis_kind),
        )
        increment_version(tensors[:3])
        return None


def _to_others(tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    """Whether each tensor is to be cast to another dtype, into a target of its own shape and layout."""
    pairs = list(zip(tensors, targets, strict=True))
    return all(t.shape == o.shape and t.stride() == o.stride() and t.dtype is not o.dtype for t, o in pairs)


def _halves_to_float32(totals: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Whether each of `grads`, of 2 bytes an element, is to be added to a float32 of its own layout."""
    same = all(t.shape == g.shape and t.stride() == g.stride() for t, g in zip(totals, grads, strict=True))
    return same and {t.dtype for t in totals} == {torch.float32} and all(g.itemsize == 2 for g in grads)


class _Layout:
    """What the library is told of a list of tensors, besides where they lie.

    Finding it out is most of a call on small tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.fits = bool(tensors) and are_plain(tensors, _CPU, _CODES.keys())
        """Whether the library takes such tensors at all; nothing else is there if not."""
        if self.fits:
            self.sizes = array("q", [t.numel() for t in tensors])
            self.codes = array("i", [_CODES[t.dtype] for t in tensors])
            self.addresses = [a.buffer_info()[0] for a in (self.sizes, self.codes)]
            self.elements = sum(self.sizes)
            self.wide = _CODES[torch.float64] in self.codes


class _Table:
    """What the library is told of a list of tensors."""

    def __init__(self, tensors: Sequence[Tensor], layout: _Layout) -> None:
        self.elements = layout.elements
        self.wide = layout.wide
        there = array(_ADDRESS, list(map(Tensor.data_ptr, tensors)))
        self._owners = there, layout
        self.arguments = (len(tensors), there.buffer_info()[0], *layout.addresses)

    def threads(self) -> int:
        # Waking another thread takes as long as this many elements do.
        return min(torch.get_num_threads(), self.elements // 2**17 + 1)


class _Prepared(list[Tensor]):
    """Tensors with their table, or with ``None`` where the library does not take them."""

    def __init__(self, tensors: Sequence[Tensor], layout: _Layout) -> None:
        super().__init__(tensors)
        self.table = _Table(tensors, layout) if layout.fits else None


def _table_of(tensors: Sequence[Tensor]) -> _Table | None:
    if isinstance(tensors, _Prepared):
        return tensors.table
    layout = _Layout(tensors)
    return _Table(tensors, layout) if layout.fits else None


def _check(status: int) -> None:
    if status != 0:
        raise MemoryError("The compiled CPU kernels of amp-core found no memory for their work lists.")


@functools.cache
def load() -> Kernels:
    """Return the compiled kernels, or the portable ones with the reason why."""
    if not _env.compiled():
        return _portable(f"{_env.COMPILED} says so")
    folder = Path(__file__).parent / "native"
    files = [folder / f"_kernels{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    built = [path for path in files if path.exists()]
    if not built:
        return _portable("the compiled kernels were not built: no C compiler at install time")
    try:
        library = ctypes.CDLL(str(built[0]))
        if library.amp_abi() != _ABI:
            raise AttributeError("it was built from other sources; install amp-core again")
        _declare(library)
    except (OSError, AttributeError) as error:
        return _portable(f"{built[0].name} does not load: {error}")
    return Compiled(library)


def _portable(reason: str) -> Kernels:
    kernels = Portable()
    kernels.reason = reason
    return kernels


def _declare(library: ctypes.CDLL) -> None:
    pointer, count, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.amp_measure.argtypes = (count, *[pointer] * 7, threads, threads)
    library.amp_scale.argtypes = (count, *[pointer] * 5, threads)
    library.amp_cast.argtypes = (count, *[pointer] * 5, threads)
    library.amp_add.argtypes = (count, *[pointer] * 4, threads)
    double, int32 = ctypes.c_double, ctypes.c_int32
    library.amp_update_scale.argtypes = (
        *[pointer] * 4,
        double,
        double,
        count,
        double,
        double,
        int32,
        threads,
    )
    library.amp_update_scale.restype = None
    library.amp_instruction_set.restype = ctypes.c_char_p
