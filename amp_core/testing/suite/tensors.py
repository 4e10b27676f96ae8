"""Generated tensors: every shape in every memory layout, and a record of the memory around a call."""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from amp_core._torch.steps import neg_view
from amp_core._torch.tensors import version_of
from amp_core.common.text import counted
from amp_core.testing.suite import data

UNTRACKED = (
    "a write did not move the version counter, which tells autograd and caches of it: after a write that is "
    "none of torch's ops, call torch.autograd.graph.increment_version(tensors). It is missing for writes"
)

GUARD = 8
"""Elements of a tensor's storage before and after it. They hold NaN; kernels must not touch them."""

# Sizes around the widths of vector registers and blocks, where tails are cut; more dimensions than any
# fixed array of strides may have.
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129)
SHAPES = (
    (),
    (1,),
    (0,),
    (3, 0),
    (17,),
    (6, 10),
    (3, 4, 5),
    (2, 3, 4, 5),
    (2, 3, 2, 3, 4),
    (2, 1) * 4 + (3, 2),
)
# Rows, columns and images whose strides are ambiguous, other numbers of dimensions, and more than one block.
ODD_SHAPES = (
    (9, 1),
    (1, 9),
    (2, 1, 4, 5),
    (2, 3, 1, 1),
    (2, 3, 1, 2, 1, 2),
    (2, 1, 2, 1, 2, 1, 2),
    (1100,),
    (17, 70),
    (2, 16, 6, 6),
)

MOVED = (
    "contiguous", "channels_last", "reversed", "swapped", "odd offset", "gaps", "padded rows", "cut",
)  # fmt: skip
LAYOUTS = (*MOVED, "negated", "conjugated", "parameter", "leaf", "graph")
_ANY_STRIDES = ("negated", "conjugated", "parameter", "leaf", "graph")
DENSE = ("contiguous", "channels_last", "odd offset", "parameter")
RARE = ("swapped", "cut", "expanded between", "expanded all", "windows")
READ_ONLY = ("expanded", "expanded inside", "expanded between", "expanded all", "windows")


_DIMENSIONS = {
    "channels_last": 3, "reversed": 2, "swapped": 3, "padded rows": 2, "cut": 2,
    "expanded": 1, "expanded inside": 1, "expanded between": 3, "expanded all": 2, "windows": 2,
}  # fmt: skip
"""How many dimensions a layout needs to differ from others."""


class Spec(NamedTuple):
    """A tensor to build."""

    shape: tuple[int, ...]
    layout: str
    dtype: torch.dtype
    seed: int = 0
    finite: bool = True

    def applies(self) -> bool:
        """Whether the layout differs from a contiguous one for this shape and dtype."""
        if self.layout == "conjugated":
            return self.dtype.is_complex
        if self.dtype.itemsize == 1 and self.layout not in (*MOVED, *READ_ONLY):
            return False  # 8-bit floats have no signs to turn and no gradients
        return len(self.shape) >= _DIMENSIONS.get(self.layout, 0)

    def moved(self, layout: str, dtype: torch.dtype) -> Spec:
        """Return a tensor of this shape in another layout, or a contiguous one where it does not apply."""
        other = Spec(self.shape, layout, dtype, self.seed + 7, self.finite)
        writable = other.applies() and layout not in READ_ONLY
        return other if writable else other._replace(layout="contiguous")

    def build(self, device: torch.device) -> Tensor:
        """Return numbers on `device`, in this layout; whatever else is in their storage is NaN."""
        if self.layout.startswith("expanded"):
            first, last = {
                "expanded": (0, 0), "expanded inside": (-1, -1), "expanded between": (1, -2)
            }.get(self.layout, (0, -1))  # fmt: skip
            there = range(first % len(self.shape), last % len(self.shape) + 1)
            shape = tuple(min(1, n) if d in there else n for d, n in enumerate(self.shape))
            whole = self._replace(shape=shape, layout="contiguous").build(device)
            return whole.expand(self.shape)
        base, strides, offset = _base(self)
        tensor = torch.as_strided(base.to(device, copy=True), self.shape, strides, offset)
        if self.layout == "negated":
            tensor = neg_view(tensor)
        if self.layout == "conjugated":
            return tensor.conj()
        if self.layout == "parameter":
            return torch.nn.Parameter(tensor)
        if self.layout in ("leaf", "graph"):
            tensor.requires_grad_()
        return tensor * 1 if self.layout == "graph" else tensor


def specs(
    dtypes: Sequence[torch.dtype],
    layouts: Sequence[str] = LAYOUTS,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> list[Spec]:
    """Return the whole space of `dtypes`, `layouts` and `shapes`, in which neighbours differ in dtype."""
    space = [(shape, layout, dtype) for layout in layouts for shape in shapes for dtype in dtypes]
    return [spec for i, point in enumerate(space) if (spec := Spec(*point, seed=i)).applies()]


def rotated(
    dtypes: Sequence[torch.dtype],
    layouts: Sequence[str] = LAYOUTS,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> list[Spec]:
    """Return every layout of every shape once, with the dtypes in turn."""
    places = [(shape, layout) for layout in layouts for shape in shapes]
    return [
        spec
        for i, (shape, layout) in enumerate(places)
        if (spec := Spec(shape, layout, dtypes[(i + i // len(dtypes)) % len(dtypes)], i)).applies()
    ]


def _strides(shape: tuple[int, ...], layout: str) -> list[int]:
    order = list(range(len(shape)))
    if layout == "reversed":
        order.reverse()
    elif layout == "swapped":
        order[-2:] = order[:-3:-1]
    elif layout in ("channels_last", "cut") and len(shape) > 2:
        order = [0, *order[2:], 1]
    strides, width = [0] * len(shape), 2 if layout == "gaps" else 1
    for dim in reversed(order):
        strides[dim] = width
        beyond = 1 if layout == "cut" else 3 if layout == "padded rows" and width == 1 else 0
        width *= max(1, shape[dim]) + beyond
    return [1] * len(shape) if layout == "windows" else strides


# Ties of bfloat16 and float16, and what is a tie only once it is rounded to float32.
_HARD = (1 + 2.0**-8 + 2.0**-30, -0.0, -1 - 2.0**-11 - 2.0**-30, 1 + 3 * 2.0**-9, 1 - 2.0**-12)
_BAD = (math.inf, -math.inf, math.nan)


@lru_cache(maxsize=64)
def _pool(dtype: torch.dtype, finite: bool) -> Tensor:
    """Return normal numbers, among them some that are hard to round, and bad ones if asked for."""
    values = data.random((1 << 14,), dtype)
    for places, kinds in ((values[1::4], _HARD), (values[: 0 if finite else None : 3], _BAD)):
        row = torch.tensor(kinds, dtype=torch.float64, device="cpu")
        places.copy_(row.repeat(len(places))[: len(places)])
    return values


def _numbers(spec: Spec) -> Tensor:
    count, pool = math.prod(spec.shape), _pool(spec.dtype, spec.finite)
    first = spec.seed * 997 % (len(pool) - count)
    return pool[first : first + count].view(spec.shape)


@lru_cache(maxsize=16_384)
def _base(spec: Spec) -> tuple[Tensor, list[int], int]:
    """Return the storage of a tensor, NaN where it has no element, with its strides and offset."""
    # What is no matter of strides comes with any: a weight may be channels_last, a gradient transposed.
    turned = ("contiguous", "channels_last", "contiguous", "reversed")[spec.seed % 4]
    values = _numbers(spec)
    strides = _strides(spec.shape, turned if spec.layout in _ANY_STRIDES else spec.layout)
    extent = sum((n - 1) * s for n, s in zip(spec.shape, strides, strict=True)) + 1 if values.numel() else 0
    offset = GUARD + (1 if spec.layout == "odd offset" else 0)
    base = torch.full((extent + offset + GUARD,), math.nan, dtype=values.dtype)
    stored = -values if spec.layout == "negated" else values.conj() if spec.layout == "conjugated" else values
    torch.as_strided(base, spec.shape, strides, offset).copy_(stored)
    return base, strides, offset


def bucket(dtype: torch.dtype, device: torch.device, seed: int = 0) -> list[Tensor]:
    """Return views that fill one storage: neighbours, every other element, columns of a matrix."""
    room = sum(LENGTHS)
    base = data.random((room + 40 + 60,), dtype, seed).to(device)
    parts, even = list(torch.split(base[:room], list(LENGTHS))), base[room : room + 40]
    matrix = base[room + 40 :].view(6, 10)
    return [*parts, even[::2], even[1::2], matrix[:, :3], matrix[:, 3:], base[:0]]


def overlapping(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return views of one storage that share addresses, lengths or elements; two are the same object."""
    base = data.random((36,), dtype).to(device)
    square = base.view(6, 6)
    windows = base.unfold(0, 6, 2)
    return [base, square, square.t(), base[:6], base[::6], base[:7], square[0], base, base[6:12], windows]


def host(tensor: Tensor) -> Tensor:
    """Return the values on the CPU, contiguous, in memory of their own."""
    return data.plain(tensor).clone(memory_format=torch.contiguous_format)


def described(tensors: Sequence[Tensor]) -> str:
    """Return how many tensors there are, and of what kind the first one is."""
    count = counted(len(tensors), "tensor")
    if not tensors:
        return count
    first = tensors[0]
    return f"{count}, first {first.dtype} of shape {tuple(first.shape)} and strides {first.stride()}"


def versions(*tensors: Tensor) -> list[int]:
    """Return the version counters."""
    return [0 if t.is_inference() else version_of(t) for t in tensors]


class Memory:
    """What a call must leave as it is: all that it does not write in the storages of its arguments.

    Args:
        read: the arguments that are only read.
        written: the arguments that are written.
        flags: the arguments that are written where something is bad.
    """

    def __init__(
        self, read: Sequence[Tensor], written: Sequence[Tensor] = (), flags: Sequence[Tensor] = ()
    ) -> None:
        self._read, self._written = list(read), list(written)
        everything = self._everything = (*self._read, *self._written, *flags)
        self._attributes = [_attributes(t) for t in everything]
        self._versions = versions(*self._read), versions(*self._written)
        self._storages = {s.data_ptr(): t for t in everything if (s := t.untyped_storage()).nbytes()}
        self._before = {address: _raw(tensor) for address, tensor in self._storages.items()}
        self._parts = defaultdict(list)
        for tensor in (*self._written, *flags):
            self._parts[tensor.untyped_storage().data_ptr()].append(tensor)

    def is_apart_from(self, results: Sequence[Tensor]) -> bool:
        """Whether `results` are dense and their addresses say that they share memory with nothing."""
        spans = [(0, 0)]
        for result in results:
            if result.numel():
                extent = sum((n - 1) * s for n, s in zip(result.shape, result.stride(), strict=True)) + 1
                if extent != result.numel() or result.untyped_storage().data_ptr() in self._storages:
                    return False
                spans.append((result.data_ptr(), result.data_ptr() + extent * result.itemsize))
        return all(end <= start for (_, end), (start, _) in pairwise(sorted(spans)))

    def check(self, *, wrote: bool = True) -> None:
        """Compare; `wrote` says that the written arguments must have changed versions."""
        for address, tensor in self._storages.items():
            before, now = self._before[address], _raw(tensor)
            if now == before:
                continue
            changed = int.from_bytes(before, "little") ^ int.from_bytes(now, "little")
            for part in self._parts[address]:
                changed &= _outside(part.shape, part.stride(), part.storage_offset(), part.itemsize, len(now))
            place = (changed & -changed).bit_length() // 8 // tensor.itemsize
            assert not changed, (
                f"the call wrote to what it must only read: element {place} of the "
                f"{len(now) // tensor.itemsize} in a storage of {tensor.dtype}"
            )
        attributes = [_attributes(t) for t in self._everything]
        for present, then in zip(attributes, self._attributes, strict=True):
            assert present == then, f"the call changed an argument from {then} to {present}"
        assert versions(*self._read) == self._versions[0], "it moved a version counter of what it only reads"
        pairs = zip(self._written, versions(*self._written), self._versions[1], strict=True)
        stale = [
            t.shape for t, now, then in pairs if wrote and t.numel() and not t.is_inference() and now <= then
        ]
        assert not stale, f"{UNTRACKED} to tensors of shapes {sorted({*map(tuple, stale)})}"


def _raw(tensor: Tensor) -> bytes:
    """Return the bytes of the storage of `tensor`."""
    whole = tensor.detach()
    if not whole.is_cpu:
        whole = whole.as_strided((whole.untyped_storage().nbytes() // whole.itemsize,), (1,), 0).cpu()
    storage = whole.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


@lru_cache(maxsize=1024)
def _outside(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, size: int, nbytes: int) -> int:
    """Return ones for the bits in a storage of `nbytes` that such a tensor has not, as a number."""
    mask = torch.full((nbytes,), 255, dtype=torch.uint8, device="cpu")
    mask.as_strided((*shape, size), (*(s * size for s in strides), 1), offset * size).zero_()
    return int.from_bytes(ctypes.string_at(mask.data_ptr(), nbytes), "little")


def _attributes(tensor: Tensor) -> dict[str, object]:
    leaf = tensor.is_leaf
    return {
        "shape": tensor.shape,
        "strides": tensor.stride(),
        "dtype": tensor.dtype,
        "address": tensor.data_ptr(),
        "requires_grad": tensor.requires_grad,
        "is_leaf": leaf,
        "grad_fn": tensor.grad_fn,
        "grad": tensor.grad if leaf else None,
    }


def chunk_edges(numel: int) -> Iterator[int]:
    """Yield the places in `numel` elements where kernels cut: around powers of two, first and last."""
    yield from (0, numel // 2 + 1, numel - 1)
    yield from (2**k for k in range(3, numel.bit_length() - 1))
