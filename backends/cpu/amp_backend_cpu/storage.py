"""The CPU's kernels for bfloat16 weights and what is kept beside them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from amp_backend_cpu.library import threads_for
from amp_core.kernels import Portable
from amp_core.kernels.interface import check_shapes
from amp_core.kernels.memory import are_plain

_CPU = torch.device("cpu")
_WIDE, _LOW, _NUMBERS = {torch.float32}, {torch.bfloat16}, {torch.int32}
_KEPT = {torch.int16, torch.bfloat16}


class StorageKernels(Portable):
    """They handle contiguous tensors; calls with any other use the portable kernels."""

    _library: ctypes.CDLL

    def join_(self, wides: Sequence[Tensor], lows: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        if not _fit((wides, _WIDE), (lows, _LOW), (kept, _KEPT)):
            return super().join_(wides, lows, kept)
        check_shapes(lows, wides, "wides", "lows")
        check_shapes(kept, wides, "wides", "kept")
        for wide, low, rest in zip(wides, lows, kept, strict=True):
            self._library.amp_join(*_addresses(wide, low, rest), *_how(wide, rest), threads_for(wide.numel()))
        increment_version(wides)
        return None

    def split_(self, wides: Sequence[Tensor], lows: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        if not _fit((wides, _WIDE), (lows, _LOW), (kept, _KEPT)):
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
        counted = [n for n in numbers if n is not None]
        if not _fit((wides, _WIDE), (lows, _LOW), (counted, _NUMBERS)) or not _numbered(wides, numbers):
            return super().round_(wides, lows, keys, numbers)
        check_shapes(wides, lows, "lows", "wides")
        for wide, low, key, own in zip(wides, lows, keys, numbers, strict=True):
            where = None if own is None else own.data_ptr()
            self._library.amp_round(
                *_addresses(wide, low), where, wide.numel(), key, threads_for(wide.numel())
            )
        increment_version(lows)
        return None


def _fit(*parts: tuple[Sequence[Tensor], AbstractSet[torch.dtype]]) -> bool:
    """Return whether the library may use the memory of tensors, which each part has in some dtypes."""
    return all(
        are_plain(tensors, _CPU, dtypes) and all(t.is_contiguous() for t in tensors)
        for tensors, dtypes in parts
    )


def _numbered(wides: Sequence[Tensor], numbers: Sequence[Tensor | None]) -> bool:
    """Return whether each element has a number, where there are numbers."""
    return all(n is None or n.shape == w.shape for w, n in zip(wides, numbers, strict=False))


def _addresses(*tensors: Tensor) -> list[int]:
    return [t.data_ptr() for t in tensors]


def _how(wide: Tensor, kept: Tensor) -> tuple[int, bool]:
    return wide.numel(), kept.dtype is torch.int16
