"""The CPU's kernels for bfloat16 weights and what is kept beside them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from amp_backend_cpu.library import threads_for
from amp_core.kernels import Portable
from amp_core.kernels.interface import check_shapes
from amp_core.kernels.memory import are_plain

_CPU = torch.device("cpu")
_DTYPES = {torch.float32, torch.bfloat16, torch.int16, torch.int32}


class StorageKernels(Portable):
    """They handle contiguous tensors; calls with any other use the portable kernels."""

    _library: ctypes.CDLL

    def join_(self, wides: Sequence[Tensor], lows: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        if not _fit([*wides, *lows, *kept]):
            return super().join_(wides, lows, kept)
        check_shapes(lows, wides, "wides", "lows")
        check_shapes(kept, wides, "wides", "kept")
        for wide, low, rest in zip(wides, lows, kept, strict=True):
            self._library.amp_join(*_addresses(wide, low, rest), *_how(wide, rest), threads_for(wide.numel()))
        increment_version(wides)
        return None

    def split_(self, wides: Sequence[Tensor], lows: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        if not _fit([*wides, *lows, *kept]):
            return super().split_(wides, lows, kept)
        check_shapes(wides, lows, "lows", "wides")
        check_shapes(wides, kept, "kept", "wides")
        for wide, low, rest in zip(wides, lows, kept, strict=True):
            self._library.amp_split(
                *_addresses(wide, low, rest), *_how(wide, rest), threads_for(wide.numel())
            )
        increment_version([*lows, *kept])
        return None

    def round_(
        self,
        wides: Sequence[Tensor],
        lows: Sequence[Tensor],
        keys: Sequence[int],
        numbers: Sequence[Tensor | None],
    ) -> None:
        if not _fit([*wides, *lows, *(n for n in numbers if n is not None)]):
            return super().round_(wides, lows, keys, numbers)
        check_shapes(wides, lows, "lows", "wides")
        for wide, low, key, counted in zip(wides, lows, keys, numbers, strict=True):
            where = None if counted is None else counted.data_ptr()
            self._library.amp_round(
                *_addresses(wide, low), where, wide.numel(), key, threads_for(wide.numel())
            )
        increment_version(lows)
        return None


def _fit(tensors: Sequence[Tensor]) -> bool:
    return are_plain(tensors, _CPU, _DTYPES) and all(t.is_contiguous() for t in tensors)


def _addresses(*tensors: Tensor) -> list[int]:
    return [t.data_ptr() for t in tensors]


def _how(wide: Tensor, kept: Tensor) -> tuple[int, bool]:
    return wide.numel(), kept.dtype is torch.int16
