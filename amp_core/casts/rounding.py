"""Split float32 values into bfloat16 weights and what is kept beside them, by arithmetic on their bits.

The same bits come out on every device; the key of the random ones is a hash of seed, step and parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from amp_core.common.counter_random import random_16_bits, random_16_bits_from

_CHUNK = 2**15
"""On the CPU, so many elements stay in the cache between the passes over them."""


def _chunks(*tensors: Tensor) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Yield the tensors, on the CPU in flat chunks, each with the number of its first element."""
    first = tensors[0]
    if first.device.type != "cpu" or not all(t.is_contiguous() for t in tensors):
        yield 0, tensors
        return
    flat = [t.view(-1) for t in tensors]
    for start in range(0, first.numel(), _CHUNK):
        yield start, [t[start : start + _CHUNK] for t in flat]


def _bits_(wide: Tensor) -> Tensor:
    """Return a view of the bits of float32 values, with one NaN that rounding cannot turn finite."""
    # On the CPU, looking for a NaN first takes a third of the time; elsewhere the host would wait.
    if wide.device.type != "cpu" or not math.isfinite(wide.sum()):
        wide.nan_to_num_(math.nan, math.inf, -math.inf)
    return wide.view(torch.int32)


def _round_(bits: Tensor, low: Tensor) -> None:
    """Write the nearest bfloat16 (ties away from zero) to `low`; overwrites `bits`."""
    bits += 0x8000
    bits >>= 16
    low.view(torch.int16).copy_(bits)


def stochastic_(wide: Tensor, low: Tensor, key: int, numbers: Tensor | None = None) -> None:
    """Round float32 up or down at random, so that the expected value is the exact one.

    Args:
        wide: overwritten.
        low: bfloat16, of the same shape; written.
        key: identifies the random bits.
        numbers: the number of each element, from which its bits are drawn; by default counted from 0.
    """
    if numbers is not None:
        bits = _bits_(wide)
        bits += random_16_bits(numbers, key)
        _round_(bits, low)
        return
    for start, (part, target) in _chunks(wide, low):
        bits = _bits_(part)
        bits += random_16_bits_from(start, part, key)
        _round_(bits, target)


def split_(wide: Tensor, low: Tensor, kept: Tensor) -> None:
    """Split float32 into the nearest bfloat16 (ties away from zero), and the 16 bits that `join` adds.

    Args:
        wide: overwritten.
        low: bfloat16, of the same shape; written.
        kept: int16, of the same shape; written.
    """
    for _, (part, target, remainder) in _chunks(wide, low, kept):
        bits = _bits_(part)
        remainder.copy_(bits)
        _round_(bits, target)


def join(low: Tensor, kept: Tensor) -> Tensor:
    """Return the float32 values that `split_` split."""
    wide = torch.empty_like(low, dtype=torch.float32)
    for _, (target, part, remainder) in _chunks(wide, low, kept):
        target.copy_(part).view(torch.int32).add_(remainder)
    return wide


def compensate_(wide: Tensor, low: Tensor, kept: Tensor) -> None:
    """Split float32 into the nearest bfloat16 and what it lacks, rounded to bfloat16.

    Args:
        wide: overwritten.
        low: bfloat16, of the same shape; written.
        kept: bfloat16, of the same shape; written.
    """
    for _, (part, target, rest) in _chunks(wide, low, kept):
        target.copy_(part)
        # An infinity lacks nothing: inf - inf is NaN.
        rest.copy_(part.sub_(target).nan_to_num_(0, 0, 0))


def add(low: Tensor, kept: Tensor) -> Tensor:
    """Return the float32 sum of two bfloat16 tensors."""
    wide = torch.empty_like(low, dtype=torch.float32)
    for _, (target, part, rest) in _chunks(wide, low, kept):
        target.copy_(part).add_(rest)
    return wide
