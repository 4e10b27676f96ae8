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

from amp_core.kernels import Kernels, Measurement, Portable, ScaleTensors
from amp_core.state import Hysteresis, Schedule

_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_SCALED = frozenset({torch.float32, torch.float64, torch.bfloat16})
_CASTS = {
    (torch.float32, torch.bfloat16): 0,
    (torch.bfloat16, torch.float32): 1,
    (torch.float16, torch.float32): 2,
}
_STATE = [torch.float32, torch.int32, torch.int32, torch.float32]
_KINDS = (Hysteresis.BUDGET, Hysteresis.CONSECUTIVE, Hysteresis.EVERY)


class Compiled(Portable):
    """Plain C with OpenMP; the instruction set is chosen when the library is loaded.

    Takes plain, contiguous tensors. A call with any other tensor (complex, strided, fake, of a
    subclass), another order of norm, or a cast to float16, goes to the portable kernels whole.
    """

    name = "compiled"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.reason = f"{library.amp_instruction_set().decode()}, OpenMP"

    def measure(self, grads: Sequence[Tensor], norm_type: float = 2.0) -> Measurement:
        if norm_type != 2.0 or not grads or not all(map(_plain, grads)):
            return super().measure(grads, norm_type)
        sums = torch.empty(len(grads), dtype=torch.float64)
        bad = torch.empty(len(grads), dtype=torch.float32)
        status = self._library.amp_measure(
            *_table(grads), sums.data_ptr(), bad.data_ptr(), torch.get_num_threads()
        )
        _check(status)
        wide = any(g.dtype is torch.float64 for g in grads)
        dtype = torch.float64 if wide else torch.float32
        return Measurement(sums.sum().sqrt().to(dtype), sums.sqrt().to(dtype), bad, bad.amax())

    def scale_(self, grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
        flags = [t for t in (factor, found_inf) if t is not None]
        right = all(_plain(t) and t.dtype is torch.float32 and t.numel() == 1 for t in flags)
        if not right or not all(_plain(g) and g.dtype in _SCALED for g in grads):
            return super().scale_(grads, factor, found_inf)
        found = found_inf.data_ptr() if found_inf is not None else None
        status = self._library.amp_scale(*_table(grads), factor.data_ptr(), found, torch.get_num_threads())
        _check(status)
        increment_version([*grads, *flags[1:]])
        return None

    def cast(
        self, tensors: Sequence[Tensor], dtype: torch.dtype, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        targets = [torch.empty_like(t, dtype=dtype) for t in tensors] if out is None else list(out)
        kinds = [_CASTS.get((t.dtype, o.dtype), -1) for t, o in zip(tensors, targets, strict=True)]
        if (
            min(kinds, default=-1) < 0
            or not all(map(_plain, (*tensors, *targets)))
            or not _same(tensors, targets)
        ):
            return super().cast(tensors, dtype, targets)
        count, data, sizes, _ = _table(tensors)
        to = _pointers(targets)
        status = self._library.amp_cast(
            count, data, to, sizes, _address(array("i", kinds)), torch.get_num_threads()
        )
        _check(status)
        increment_version(targets)
        return targets

    def update_scale_(self, state: ScaleTensors, found_inf: Tensor, schedule: Schedule) -> None:
        tensors = [state.scale, state.growth_tracker, state.hysteresis_left]
        dtypes = [t.dtype for t in (*tensors, found_inf)]
        if dtypes != _STATE or not all(map(_real, (*tensors, found_inf))):
            return super().update_scale_(state, found_inf, schedule)
        self._library.amp_update_scale(
            *[t.data_ptr() for t in (*tensors, found_inf)],
            schedule.growth_factor,
            schedule.backoff_factor,
            schedule.growth_interval,
            schedule.min_scale,
            schedule.max_scale,
            schedule.hysteresis,
            _KINDS.index(schedule.hysteresis_kind),
        )
        increment_version(tensors)
        return None


def _real(tensor: Tensor) -> bool:
    """Whether the memory of `tensor` is there to be read: no fake tensor, no subclass, on the CPU."""
    return type(tensor) in {Tensor, torch.nn.Parameter} and tensor.device.type == "cpu"


def _plain(tensor: Tensor) -> bool:
    return (
        _real(tensor)
        and tensor.dtype in _CODES
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _same(tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    return all(t.shape == o.shape for t, o in zip(tensors, targets, strict=True))


class _Array(ctypes.c_void_p):
    """An address that keeps the array behind it alive."""

    owner: array[int]


def _address(values: array[int]) -> _Array:
    address = _Array(values.buffer_info()[0])
    address.owner = values
    return address


def _pointers(tensors: Sequence[Tensor]) -> _Array:
    return _address(array("Q", [t.data_ptr() for t in tensors]))


def _table(tensors: Sequence[Tensor]) -> tuple[int, _Array, _Array, _Array]:
    sizes = array("q", [t.numel() for t in tensors])
    codes = array("i", [_CODES[t.dtype] for t in tensors])
    return len(tensors), _pointers(tensors), _address(sizes), _address(codes)


def _check(status: int) -> None:
    if status != 0:
        raise MemoryError("The compiled CPU kernels of amp-core found no memory for their work lists.")


@functools.cache
def load() -> Kernels:
    """Return the compiled kernels, or the portable ones with the reason why."""
    folder = Path(__file__).parent / "native"
    files = [folder / f"_kernels{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    built = [path for path in files if path.exists()]
    if not built:
        return _portable("the compiled kernels were not built: no C compiler at install time")
    try:
        library = ctypes.CDLL(str(built[0]))
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
    library.amp_measure.argtypes = (count, *[pointer] * 5, threads)
    library.amp_scale.argtypes = (count, *[pointer] * 5, threads)
    library.amp_cast.argtypes = (count, *[pointer] * 4, threads)
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
