"""Split float32 values into bfloat16 weights and what is kept beside them, by arithmetic on their bits.

The same bits come out on every device. Random numbers are a hash of seed, step, parameter and element, so
they depend on neither the device nor the number of ranks, and a resumed run draws them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_32_BITS = 0xFFFFFFFF


def key_of(*numbers: int) -> int:
    """Return 64 well-mixed bits of some integers (SplitMix64)."""
    key = 0
    for number in numbers:
        key = (key + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        key ^= key >> 31
    return key


def element_numbers(
    shape: Sequence[int], offset: Sequence[int], whole: Sequence[int], device: torch.device
) -> Tensor:
    """Return the int32 number of each element of a shard: its index in the flattened whole, modulo 2**32.

    Args:
        shape: the shape of the shard.
        offset: where the shard begins in the whole tensor.
        whole: the shape of the whole tensor.
        device: where the result is needed.
    """
    if tuple(shape) == tuple(whole) and math.prod(whole) < 2**31:
        return torch.arange(math.prod(whole), dtype=torch.int32, device=device).view(*whole)
    numbers = torch.zeros((), dtype=torch.int64, device=device)
    for size, start, length in zip(shape, offset, whole, strict=True):
        numbers = numbers.unsqueeze(-1) * length + torch.arange(start, start + size, device=device)
    return numbers.to(torch.int32)


def _signed(value: int) -> int:
    value &= _32_BITS
    return value - (1 << 32) if value >> 31 else value


def _mix(x: Tensor) -> Tensor:
    """Hash int32 values in place (lowbias32)."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x


def random_16_bits(numbers: Tensor, key: int) -> Tensor:
    """Return 16 random bits for each element number, in int32."""
    x = _mix(numbers + _signed(key))
    x ^= _signed(key >> 32)
    return _mix(x) & 0xFFFF


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
    return _in_chunks(lambda w, n: (_from_upper(_bits(w) + random_16_bits(n, key)),), wide, numbers)[0]


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
