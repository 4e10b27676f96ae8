"""The compiled passes of quantising."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from amp_backend_cpu.library import threads_for
from amp_core.common.counter_random import key_of
from amp_core.formats.elements import E2M1, ELEMENTS, ElementFormat
from amp_core.formats.groups import Groups
from amp_core.formats.packing import pack, pack_codes
from amp_core.formats.passes import Passes, Rounding
from amp_core.formats.scales import SCALES, GroupScales, outer_scale
from amp_core.kernels.memory import are_real

_CODES = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 3}
_CPU = torch.device("cpu")
_STORED = {"e8m0": torch.float8_e8m0fnu, "e8m0_up": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}
_FEW = 64
"""For fewer scales, the library's call takes longer than PyTorch's."""
_LINE = 2**15
"""A tensor with one scale is seen as lines of so many elements, which threads share."""


def takes(tensor: Tensor, dim: int) -> bool:
    """Return whether the library quantises `tensor` along `dim`."""
    return (
        tensor.dtype in _CODES
        and are_real([tensor], _CPU)
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and tensor.numel() > 0
        and tensor.dim() > 0
        and max(-2, -tensor.dim()) <= _from_end(tensor, dim) <= -1
        and tensor.data_ptr() != 0
    )


class CompiledPasses(Passes):
    """The passes of `native/quantize.c`, for tensors that `takes` accepts."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def prepare(self, x: Tensor) -> Tensor:
        return x if _is_transposed(x) else x.contiguous()

    def largest(self, x: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        tiles = _flat(x) if groups.granularity == "tensor" else _tiles(x, groups)
        amax, counts = torch.empty(tiles.scales, device=_CPU, dtype=torch.float32), _counts()
        self._library.amp_quantize_largest(
            *(x.data_ptr(), _CODES[x.dtype], tiles.numbers, amax.data_ptr(), counts.data_ptr()),
            threads_for(x.numel()),
        )
        if groups.granularity == "tensor":
            return amax.amax(), counts
        return groups.inward(_swapped(amax, x)), counts

    def scales(
        self,
        own: Tensor,
        found: Tensor,
        element: ElementFormat,
        kind: str,
        tensor_amax: Tensor,
        *,
        packed: bool,
    ) -> GroupScales:
        if own.numel() < _FEW or own.stride() != found.stride() or not _is_dense(own):
            return super().scales(own, found, element, kind, tensor_amax, packed=packed)
        dtype = _STORED.get(kind) if packed else None
        encode, scale = torch.empty_like(found), torch.empty_like(found, dtype=dtype or torch.float32)
        outer = outer_scale(tensor_amax, element) if kind == "e4m3" else None
        self._library.amp_quantize_scales(
            *(own.data_ptr(), found.data_ptr(), own.numel()),
            struct.pack("=ifi", list(SCALES).index(kind), element.max, element.max_exponent),
            *(outer.data_ptr() if outer is not None else None, encode.data_ptr(), scale.data_ptr()),
            *(dtype is not None, threads_for(own.numel())),
        )
        return GroupScales(encode, scale, outer)

    def round(self, x: Tensor, groups: Groups, encode: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
        if rounding.packed and rounding.element not in ELEMENTS.values():  # its codes may be others
            values, counts = self.round(x, groups, encode, rounding._replace(packed=False))
            return pack(values, rounding.element), counts
        single = groups.granularity == "tensor"
        if single:
            tiles = _flat(x) if rounding.seed is None else _lines(x)
        else:
            tiles, encode = _tiles(x, groups), _swapped(groups.outward(encode), x).contiguous()
        paired = rounding.packed and rounding.element == E2M1 and _is_pairable(x, tiles)
        if paired:
            out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8)
        else:
            out = torch.empty_like(x, dtype=torch.uint8 if rounding.packed else torch.float32)
        counts = _counts()
        draws, numbers = (None, None) if rounding.seed is None else _draws(x, rounding.seed)
        self._library.amp_quantize_round(
            *(x.data_ptr(), _CODES[x.dtype], tiles.numbers, encode.data_ptr()),
            *(single, not rounding.may_saturate),
            *(_element(rounding.element), draws, numbers, out.data_ptr(), rounding.packed + paired),
            *(counts.data_ptr(), threads_for(x.numel())),
        )
        return pack_codes(out, rounding.element) if rounding.packed and not paired else out, counts


class _Tiles(NamedTuple):
    """``struct tiles`` of the library, and the shape of the scales in the order of memory."""

    numbers: bytes
    scales: tuple[int, ...]


def _is_dense(x: Tensor) -> bool:
    """Return whether `x` is contiguous in some order of its dimensions."""
    return x.is_contiguous() or (x.dim() > 1 and x.mT.is_contiguous())


def _flat(x: Tensor) -> _Tiles:
    lines = -(-x.numel() // _LINE)
    return _Tiles(struct.pack("=5q", 1, 1, x.numel(), 1, _LINE), (lines,))


def _lines(x: Tensor) -> _Tiles:
    batches, rows, columns = _extent(x)
    return _Tiles(struct.pack("=5q", batches, rows, columns, 1, columns), (batches, rows, 1))


def _tiles(x: Tensor, groups: Groups) -> _Tiles:
    batches, *sizes = _extent(x)
    along = 1 if (_from_end(x, groups.dim) == -1) != _is_transposed(x) else 0
    extent, shared = [1, 1], groups.granularity
    if isinstance(shared, tuple):
        extent[1 - along], extent[along] = shared
    else:
        extent[along] = shared if isinstance(shared, int) else sizes[along]
    extent = [*map(min, extent, sizes)]
    scales = [-(-size // part) for size, part in zip(sizes, extent, strict=True)]
    if x.dim() == 1 and not isinstance(shared, tuple):
        scales = scales[1:]
    memory = x.mT if _is_transposed(x) else x
    return _Tiles(struct.pack("=5q", batches, *sizes, *extent), (*memory.shape[:-2], *scales))


def _extent(x: Tensor) -> tuple[int, int, int]:
    """Return the batches, rows and columns of `x` in the order of memory."""
    rows, columns = (1, *x.shape)[-2:]
    if _is_transposed(x):
        rows, columns = columns, rows
    return x.numel() // (rows * columns), rows, columns


def _is_pairable(x: Tensor, tiles: _Tiles) -> bool:
    """Return whether neighbours along the last dimension are pairs in memory, within pieces of the loop."""
    width = struct.unpack("=5q", tiles.numbers)[-1]
    return x.is_contiguous() and x.shape[-1] % 2 == 0 and (width % 2 == 0 or width == 1)


def _is_transposed(x: Tensor) -> bool:
    return x.dim() > 1 and not x.is_contiguous() and x.mT.is_contiguous()


def _swapped(scale: Tensor, x: Tensor) -> Tensor:
    """Change a scale of `x` from the order of memory to that of `x`, or back."""
    return scale.mT if _is_transposed(x) else scale


def _draws(x: Tensor, seed: int | Tensor) -> tuple[bytes, bytes]:
    """Return ``struct draws``, and by how much elements' numbers grow along batches, rows and columns."""
    key = int(seed) if isinstance(seed, Tensor) else key_of(seed)
    last = x.shape[-1]
    numbers = (math.prod(x.shape[-2:]), *((1, last) if _is_transposed(x) else (last, 1)))
    words = (key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF, numbers[2] & 0xFFFFFFFF)
    return struct.pack("=3I", *words), struct.pack("=3q", *numbers)


@functools.cache
def _element(element: ElementFormat) -> bytes:
    """Return ``struct element``."""
    fraction = element.max / 2.0**element.max_exponent - 1
    largest = (element.max_exponent + element.bias + fraction) * 2**element.mantissa_bits
    return struct.pack(
        "=IffiIIf",
        *(element.mantissa_bits, element.smallest_normal, 2.0 ** (element.max_exponent + 1), int(largest)),
        *(element.bits - 1, 0x7F if element.bits == 8 else 0, element.max),
    )


def _from_end(x: Tensor, dim: int) -> int:
    """Return `dim` counted from the end; as it is if `x` has no such dimension."""
    return dim - x.dim() if 0 <= dim < x.dim() else dim


def _counts() -> Tensor:
    return torch.empty(2, dtype=torch.int64, device=_CPU)
