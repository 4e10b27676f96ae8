"""Random bits that are a hash of a key and an element's number.

The same numbers come out on every device and on any number of ranks, and a resumed run draws them again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
        return torch.arange(math.prod(whole), dtype=torch.int32, device=device).view(tuple(whole))
    numbers = torch.zeros((), dtype=torch.int64, device=device)
    for size, start, length in zip(shape, offset, whole, strict=True):
        numbers = numbers.unsqueeze(-1) * length + torch.arange(start, start + size, device=device)
    return numbers.to(torch.int32)


def _signed(value: int) -> int:
    value &= _32_BITS
    return value - (1 << 32) if value >> 31 else value


def _word(key: int | Tensor) -> int | Tensor:
    return key.to(torch.int32) if isinstance(key, Tensor) else _signed(key)


def _shifted_xor_(x: Tensor, shift: int) -> Tensor:
    """Compute ``x ^= x >> shift`` in place; the shift fills with zeros."""
    shifted = x >> shift
    shifted &= _32_BITS >> shift
    x ^= shifted
    return x


def _mix(x: Tensor) -> Tensor:
    """Hash int32 values in place (lowbias32)."""
    x = _shifted_xor_(x, 16)
    x *= 0x7FEB352D
    x = _shifted_xor_(x, 15)
    x *= _signed(0x846CA68B)
    return _shifted_xor_(x, 16)


def random_bits(numbers: Tensor, key: int | Tensor, count: int) -> Tensor:
    """Return `count` random bits, at most 31, for each int32 element number, in int32.

    Args:
        numbers: int32.
        key: 64 bits; in a graph, a 0-dim int64 tensor.
        count: how many bits.
    """
    first, second = _word(key), _word(key >> 32)
    x = _mix(numbers + first)
    x ^= second
    return _mix(x) & ((1 << count) - 1)


def _hash_(x: Tensor, key: int) -> Tensor:
    """Turn distinct int32 values into random bits, in place: triple32, with the key in two of its rounds."""
    x += _signed(key)
    x *= _signed(0xED5AD4BB)
    x = _shifted_xor_(x, 11)
    x ^= _signed(key >> 32)
    x *= _signed(0xAC4C1B51)
    x = _shifted_xor_(x, 15)
    x *= 0x31848BAB
    return _shifted_xor_(x, 14)


def random_16_bits(numbers: Tensor, key: int) -> Tensor:
    """Return 16 random bits, as int16, for each element number: each hash serves two neighbours."""
    halves = _hash_((numbers >> 1) & 0x7FFFFFFF, key).unsqueeze(-1).view(torch.int16)
    return torch.where(numbers & 1 == 0, halves[..., 0], halves[..., 1])


def random_16_bits_from(start: int, like: Tensor, key: int) -> Tensor:
    """Return `random_16_bits` of the elements from an even number on, in the shape of `like`."""
    pairs = torch.arange(start // 2, (start + like.numel() + 1) // 2, dtype=torch.int32, device=like.device)
    return _hash_(pairs, key).view(torch.int16)[: like.numel()].view(like.shape)
