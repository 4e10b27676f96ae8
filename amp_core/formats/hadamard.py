"""The random Hadamard transform, which spreads outliers over a block."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from amp_core._torch.tensors import beside, uncut
from amp_core._torch.tracing import may_hold
from amp_core.common.counter_random import key_of, random_bits

_KEY = key_of(0x4841)
"""Of the signs: one fixed vector for all tensors, so that the operands of a product agree."""


def rotate(x: Tensor, size: int, dim: int) -> Tensor:
    """Flip random signs and apply the orthogonal Hadamard matrix to blocks of `size` along `dim`.

    The result is padded to a multiple of `size`. A product of two tensors that are transformed along the
    contracted dimension is that of the tensors themselves.

    Args:
        x: float32.
        size: a power of two.
        dim: the dimension of the blocks.
    """
    x = uncut(x.movedim(dim, -1), -1, size)
    missing = -x.shape[-1] % size
    if may_hold(missing != 0):
        x = pad(x, [0, missing])
    blocks = torch.unflatten(x, -1, (x.shape[-1] // size, size))
    return _walsh_hadamard(blocks * _signs(size, x)).flatten(-2).movedim(-1, dim)


def rotate_back(x: Tensor, size: int, dim: int, length: int) -> Tensor:
    """Undo `rotate` of a tensor with `length` elements along `dim`."""
    x = x.movedim(dim, -1)
    blocks = torch.unflatten(x, -1, (x.shape[-1] // size, size))
    blocks = _walsh_hadamard(blocks) * _signs(size, x)
    return blocks.flatten(-2)[..., :length].movedim(-1, dim)


def _signs(size: int, x: Tensor) -> Tensor:
    numbers = torch.arange(size, dtype=torch.int32, device=x.device)
    return beside((random_bits(numbers, _KEY, 1) * -2 + 1).to(torch.float32), x)


def _walsh_hadamard(x: Tensor) -> Tensor:
    """Multiply the last dimension by the symmetric, orthogonal Hadamard matrix.

    Sums and differences in a fixed order give the same bits on every device, which a matrix product does not.
    """
    size = x.shape[-1]
    x = x * (1 / math.sqrt(size))  # first: sums of the largest values would overflow
    step = 1
    while step < size:
        first, second = torch.unflatten(x, -1, (size // (2 * step), 2, step)).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        step *= 2
    return x
