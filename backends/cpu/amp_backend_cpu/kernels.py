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

from amp_core import _env, _torch
from amp_core.kernels import Kernels, Measurement, Portable, ScaleTensors
from amp_core.state import Hysteresis, Schedule

_ABI = 2
"""What `native/kernels.c` says of itself; a library from other sources must not be called."""

_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_TYPES = {Tensor, torch.nn.Parameter}
_STATE = [torch.float32, torch.int32, torch.int32, torch.float32]
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

    def prepare(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return _Prepared(tensors)

    def measure(self, grads: Sequence[Tensor], norm_type: float = 2.0) -> Measurement:
        table = _table_of(grads) if norm_type == 2.0 else None
        if table is None:
            return super().measure(grads, norm_type)
        sums = torch.empty(len(grads), dtype=torch.float64)
        bad = torch.empty(len(grads), dtype=torch.float32)
        _check(self._library.amp_measure(*table.arguments, sums.data_ptr(), bad.data_ptr(), table.threads()))
        dtype = torch.float64 if _CODES[torch.float64] in table.codes else torch.float32
        return Measurement(sums.sum().sqrt().to(dtype), sums.sqrt().to(dtype), bad, bad.amax())

    def scale_(self, grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
        flags = [t for t in (factor, found_inf) if t is not None]
        right = all(t.dtype is torch.float32 and t.numel() == 1 for t in flags) and _all_plain(flags)
        table = _table_of(grads) if right else None
        if table is None:
            return super().scale_(grads, factor, found_inf)
        found = found_inf.data_ptr() if found_inf is not None else None
        _check(self._library.amp_scale(*table.arguments, factor.data_ptr(), found, table.threads()))
        increment_version([*grads, *flags[1:]])
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


def _all_real(tensors: Sequence[Tensor]) -> bool:
    """Whether the memory of `tensors` is there to be read: none is fake, of a subclass or on a device."""
    if _torch.functorch_is_at_work() or not _TYPES.issuperset(map(type, tensors)):
        return False
    return all([t.is_cpu for t in tensors])  # noqa: C419 (a list is faster than a generator)


def _all_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether each of `tensors` is a piece of memory, without gaps, of a dtype that the library takes."""
    if not _all_real(tensors) or not _CODES.keys() >= {t.dtype for t in tensors}:
        return False
    if any([t.is_neg() for t in tensors]):  # noqa: C419
        return False
    strided = [t for t in tensors if not t.is_contiguous()]
    return not strided or all(map(_without_gaps, strided))


def _without_gaps(tensor: Tensor) -> bool:
    """Whether `tensor` is a permuted contiguous one, such as one in channels_last."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True)
    return tensor.permute(order).is_contiguous()


def _to_others(tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    """Whether each tensor is to be cast to another dtype, into a target of its own shape and layout."""
    pairs = list(zip(tensors, targets, strict=True))
    return all(t.shape == o.shape and t.stride() == o.stride() and t.dtype is not o.dtype for t, o in pairs)


class _Table:
    """What the library is told of a list of tensors. Gathering it is most of a call on small tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        pointers = array("Q", [t.data_ptr() for t in tensors])
        sizes = array("q", [t.numel() for t in tensors])
        self.codes = array("i", [_CODES[t.dtype] for t in tensors])
        self.elements = sum(sizes)
        self.owners = (pointers, sizes, self.codes)
        self.arguments = (len(tensors), *[a.buffer_info()[0] for a in self.owners])

    def threads(self) -> int:
        # Waking another thread takes longer than a quarter of a million elements do.
        return min(torch.get_num_threads(), self.elements // 2**18 + 1)


class _Prepared(list[Tensor]):
    """Tensors with their table, or with ``None`` where the library does not take them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors)
        self.table = _table_of(tensors)


def _table_of(tensors: Sequence[Tensor]) -> _Table | None:
    if isinstance(tensors, _Prepared):
        return tensors.table
    return _Table(tensors) if tensors and _all_plain(tensors) else None


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
