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

from amp_core import _torch
from amp_core.kernels import Kernels, Measurement, Portable, ScaleTensors
from amp_core.state import Hysteresis, Schedule

_ABI = 2
"""What `native/kernels.c` says of itself; a library from other sources must not be called."""

_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_STATE = [torch.float32, torch.int32, torch.int32, torch.float32]
_KINDS = (Hysteresis.BUDGET, Hysteresis.CONSECUTIVE, Hysteresis.EVERY)


class Compiled(Portable):
    """Plain C with OpenMP; the instruction set is chosen when the library is loaded.

    Takes plain, contiguous tensors. A call with any other tensor (complex, strided, fake, of a
    subclass), another order of norm, or a cast that changes nothing, goes to the portable kernels whole.
    """

    name = "compiled"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.reason = f"{library.amp_instruction_set().decode()}, OpenMP"

    def measure(self, grads: Sequence[Tensor], norm_type: float = 2.0) -> Measurement:
        if norm_type != 2.0 or not grads or not _all_plain(grads):
            return super().measure(grads, norm_type)
        sums = torch.empty(len(grads), dtype=torch.float64)
        bad = torch.empty(len(grads), dtype=torch.float32)
        status = self._library.amp_measure(*_table(grads), sums.data_ptr(), bad.data_ptr(), _threads(grads))
        _check(status)
        wide = any(g.dtype is torch.float64 for g in grads)
        dtype = torch.float64 if wide else torch.float32
        return Measurement(sums.sum().sqrt().to(dtype), sums.sqrt().to(dtype), bad, bad.amax())

    def scale_(self, grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
        flags = [t for t in (factor, found_inf) if t is not None]
        right = all(t.dtype is torch.float32 and t.numel() == 1 for t in flags)
        if not right or not _all_plain([*grads, *flags]):
            return super().scale_(grads, factor, found_inf)
        found = found_inf.data_ptr() if found_inf is not None else None
        status = self._library.amp_scale(*_table(grads), factor.data_ptr(), found, _threads(grads))
        _check(status)
        increment_version([*grads, *flags[1:]])
        return None

    def cast(
        self, tensors: Sequence[Tensor], dtype: torch.dtype, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        targets = [torch.empty_like(t, dtype=dtype) for t in tensors] if out is None else list(out)
        if not tensors or not _all_plain([*tensors, *targets]) or not _to_others(tensors, targets):
            return super().cast(tensors, dtype, targets)
        _, to, _, codes = _table(targets)
        status = self._library.amp_cast(*_table(tensors), to, codes, _threads(tensors))
        _check(status)
        increment_version(targets)
        return targets

    def update_scale_(self, state: ScaleTensors, found_inf: Tensor, schedule: Schedule) -> None:
        tensors = [state.scale, state.growth_tracker, state.hysteresis_left]
        dtypes = [t.dtype for t in (*tensors, found_inf)]
        if dtypes != _STATE or not _all_real([*tensors, found_inf]):
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


def _all_real(tensors: Sequence[Tensor]) -> bool:
    return not _torch.functorch_is_at_work() and all(map(_real, tensors))


def _all_plain(tensors: Sequence[Tensor]) -> bool:
    return not _torch.functorch_is_at_work() and all(map(_plain, tensors))


def _plain(tensor: Tensor) -> bool:
    return (
        _real(tensor)
        and tensor.dtype in _CODES
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _to_others(tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    """Whether each tensor is to be cast to another dtype, into a target of its own shape."""
    return all(t.shape == o.shape and t.dtype is not o.dtype for t, o in zip(tensors, targets, strict=True))


class _Array(ctypes.c_void_p):
    """An address that keeps the array behind it alive."""

    owner: array[int]


def _address(values: array[int]) -> _Array:
    address = _Array(values.buffer_info()[0])
    address.owner = values
    return address


def _table(tensors: Sequence[Tensor]) -> tuple[int, _Array, _Array, _Array]:
    pointers = array("Q", [t.data_ptr() for t in tensors])
    sizes = array("q", [t.numel() for t in tensors])
    codes = array("i", [_CODES[t.dtype] for t in tensors])
    return len(tensors), _address(pointers), _address(sizes), _address(codes)


def _threads(tensors: Sequence[Tensor]) -> int:
    # Waking another thread takes longer than a quarter of a million elements do.
    return min(torch.get_num_threads(), sum(t.numel() for t in tensors) // 2**18 + 1)


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
    library.amp_measure.argtypes = (count, *[pointer] * 5, threads)
    library.amp_scale.argtypes = (count, *[pointer] * 5, threads)
    library.amp_cast.argtypes = (count, *[pointer] * 5, threads)
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
