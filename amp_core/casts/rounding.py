"""Split float32 values into bfloat16 weights and what is kept beside them, by arithmetic on their bits.

The same bits come out on every device; the key of the random ones is a hash of seed, step and parameter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from amp_core.common.counter_random import random_bits


def _bits(wide: Tensor) -> Tensor:
    """Return the bits of float32 values, with one NaN that rounding cannot turn finite."""
    return wide.masked_fill(wide.isnan(), torch.nan).view(torch.int32)


def _from_upper(bits: Tensor) -> Tensor:
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


_CHUNK = 2**15
"""On the CPU, so many elements stay in the cache between the passes over them."""


def _in_chunks(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> list[Tensor]:
    """Return ``function(*tensors)``, computed in chunks on the CPU."""
    first = tensors[0]
    if first.device.type != "cpu" or first.numel() <= _CHUNK:
        return list(function(*tensors))
    chunks = zip(*(torch.split(t.flatten(), _CHUNK) for t in tensors), strict=True)
    return [torch.cat(parts).view(first.shape) for parts in zip(*(function(*c) for c in chunks), strict=True)]


def stochastic(wide: Tensor, numbers: Tensor, key: int) -> Tensor:
    """Round float32 to bfloat16 up or down at random, so that the expected value is the exact one."""
    return _in_chunks(lambda w, n: (_from_upper(_bits(w) + random_bits(n, key, 16)),), wide, numbers)[0]


def split(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest bfloat16 (ties away from zero), and the 16 bits that `join` needs to undo it."""
    low, kept = _in_chunks(_split, wide)
    return low, kept


def _split(wide: Tensor) -> tuple[Tensor, Tensor]:
    bits = _bits(wide)
    return _from_upper(bits + 0x8000), bits.to(torch.int16)


def join(low: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 values that `split` split."""
    return _in_chunks(_join, low, remainder)[0]


def _join(low: Tensor, remainder: Tensor) -> tuple[Tensor]:
    upper = (low.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)) << 16
    return ((upper | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32),)
