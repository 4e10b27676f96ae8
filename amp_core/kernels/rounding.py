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

_NORMAL = torch.finfo(torch.bfloat16).tiny
"""The smallest lack that is looked at for ties: smaller ones have fewer digits, and weigh nothing."""


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
    return wide.nan_to_num_(math.nan, math.inf, -math.inf).view(torch.int32)


def _round_(bits: Tensor, low: Tensor) -> None:
    """Write the nearest bfloat16 (ties away from zero) to `low`; overwrites `bits`."""
    bits += 0x8000
    bits >>= 16
    low.view(torch.int16).copy_(bits)
    if torch.is_inference_mode_enabled() and not low.is_inference():
        torch.autograd.graph.increment_version(low)  # views in another dtype have their own counter there


def stochastic_(wide: Tensor, low: Tensor, key: int, numbers: Tensor | None) -> None:
    """Round up or down at random, by the bits of each element's number; see `Kernels.round_`."""
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
    """Split float32 as the dtype of `kept` says; see `Kernels.split_`."""
    part_of = _remainder_ if kept.dtype is torch.int16 else _compensation_
    for _, (part, target, rest) in _chunks(wide, low, kept):
        part_of(part, target, rest)


def _remainder_(wide: Tensor, low: Tensor, kept: Tensor) -> None:
    bits = _bits_(wide)
    kept.copy_(bits)
    _round_(bits, low)


def _compensation_(wide: Tensor, low: Tensor, kept: Tensor) -> None:
    low.copy_(wide)
    # An infinity lacks nothing: inf - inf is NaN.
    kept.copy_(wide.sub_(low).nan_to_num_(0, 0, 0))
    # What is rounded to half a step makes a tie: the sum would be rounded to the next weight.
    moves = (wide.copy_(low).add_(kept).to(low.dtype) != low) & (kept.abs() >= _NORMAL)
    kept.view(torch.int16).sub_(moves.to(torch.int16))


def join_(wide: Tensor, low: Tensor, kept: Tensor) -> None:
    """Undo `split_`; see `Kernels.join_`."""
    for _, (target, part, rest) in _chunks(wide, low, kept):
        target.copy_(part)
        if kept.dtype is torch.int16:
            target.view(torch.int32).add_(rest)
        else:
            target.add_(rest)
