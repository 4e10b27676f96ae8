"""The bits of stored weights: split, joined and rounded at random."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amp_core.common import counter_random
from amp_core.kernels import rounding

from ..drawn import examples

LOW, WIDE = torch.bfloat16, torch.float32


def join(low: Tensor, kept: Tensor) -> Tensor:
    wide = torch.empty_like(low, dtype=WIDE)
    rounding.join_(wide, low, kept)
    return wide


def split(wide: Tensor) -> tuple[Tensor, Tensor]:
    low, kept = torch.empty_like(wide, dtype=LOW), torch.empty_like(wide, dtype=torch.int16)
    rounding.split_(wide.clone(), low, kept)
    return low, kept


def stochastic(wide: Tensor, key: int, numbers: Tensor | None = None) -> Tensor:
    low = torch.empty_like(wide, dtype=LOW)
    rounding.stochastic_(wide.clone(), low, key, numbers)
    return low


@examples()
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=64))
def test_split_and_join_are_inverse(patterns: list[int]) -> None:
    """One float32 value that does not come back breaks the promise of the exact trajectory."""
    wide = torch.tensor(patterns, dtype=torch.int32).view(WIDE)
    low, kept = split(wide)
    back = join(low, kept)
    nan = wide.isnan()
    assert torch.equal(back.isnan(), nan)
    assert torch.equal(low.isnan(), nan)
    assert torch.equal(back.view(torch.int32)[~nan], wide.view(torch.int32)[~nan])
    assert ((low.float() - wide).abs() <= (wide.to(LOW).float() - wide).abs())[wide.isfinite()].all()


def test_stochastic_rounding_is_unbiased_and_leaves_exact_values() -> None:
    """A biased rounding drifts; one that moves exact values changes weights without an update."""
    for part in (0.3, 0.5, 0.9):
        value = 1 + part * 2**-7
        rounded = stochastic(torch.full((40000,), value), counter_random.key_of(0, 1))
        assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
        assert abs(rounded.float().mean().item() - value) < 5e-5
    exact = torch.randn(40000).to(LOW)
    assert torch.equal(stochastic(exact.float(), 7), exact)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    assert torch.equal(stochastic(special, 7).float().nan_to_num(5), special.nan_to_num(5))


def test_every_random_bit_is_fair_and_independent_of_its_neighbours() -> None:
    """A weak hash: neighbouring elements, or the next step, would be rounded the same way."""
    n = 2**16
    numbers = torch.arange(n, dtype=torch.int32)
    draws = [counter_random.random_16_bits(numbers, counter_random.key_of(0, step)) for step in (1, 2)]
    bits = torch.stack([(d.int() >> i) & 1 for d in draws for i in range(16)]).double() * 2 - 1
    noise = 5 / n**0.5
    assert bits.mean(1).abs().max() < noise
    for lag in (0, 1, 2, 3, 64):
        products = bits[:, : n - lag] @ bits[:, lag:].T / (n - lag)
        if lag == 0:
            products.fill_diagonal_(0)
        assert products.abs().max() < noise, lag


@pytest.mark.parametrize("shape", [(300, 257), (2**15 + 1,), (), (0, 3)])
@pytest.mark.parametrize("dense", [True, False])
def test_chunks_change_no_bits(shape: tuple[int, ...], dense: bool) -> None:
    """Large tensors are computed in chunks on the CPU: a chunk that is out of place mixes up weights."""
    wide = torch.randn(shape)
    if not dense and wide.dim() == 2:
        wide = torch.randn(shape[::-1]).T
    numbers = torch.arange(wide.numel(), dtype=torch.int32).view(wide.shape)
    low, kept = split(wide)
    assert torch.equal(join(low, kept), wide)
    bits = wide.view(torch.int32)
    assert torch.equal(kept, bits.to(torch.int16))
    assert torch.equal(low.view(torch.int16), ((bits + 0x8000) >> 16).to(torch.int16))
    assert torch.equal(stochastic(wide, 5), stochastic(wide, 5, numbers))
    kahan, rest = torch.empty_like(low), torch.empty_like(low)
    rounding.split_(wide.clone(), kahan, rest)
    assert torch.equal(kahan, wide.bfloat16())
    lack = (wide - kahan).bfloat16()
    moves = (kahan + lack.float()).bfloat16() != kahan  # what is rounded to half a step makes a tie
    assert moves.any() or wide.numel() < 1000
    smaller = torch.nextafter(lack, torch.zeros_like(lack))
    assert torch.equal(rest, torch.where(moves, smaller, lack))
    assert torch.equal(join(kahan, rest), kahan.float() + rest)
    assert torch.equal(join(kahan, rest).bfloat16(), kahan)


def test_random_bits_are_pinned() -> None:
    """Other bits on another device, or in the next release, and a run cannot be resumed bit for bit."""
    key = counter_random.key_of(0, 1, 2)
    assert key == 17650578182555822980

    def mix(x: int) -> int:
        x = (x + key) * 0xED5AD4BB & 0xFFFFFFFF
        x = (x ^ x >> 11 ^ key >> 32) * 0xAC4C1B51 & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x31848BAB & 0xFFFFFFFF
        return x ^ x >> 14

    numbers = [*range(1000), *range(2**32 - 8, 2**32)]
    wanted = [mix(i >> 1) >> 16 * (i & 1) & 0xFFFF for i in numbers]
    drawn = counter_random.random_16_bits(torch.tensor(numbers).to(torch.int32), key)
    assert [value & 0xFFFF for value in drawn.tolist()] == wanted

    def other_mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    wanted = [other_mix(other_mix((i + key) & 0xFFFFFFFF) ^ key >> 32) & 0xFFFF for i in range(1000)]
    assert counter_random.random_bits(torch.arange(1000, dtype=torch.int32), key, 16).tolist() == wanted


def test_a_shard_draws_the_numbers_of_its_elements() -> None:
    """With another number of ranks, each element would be rounded otherwise."""
    whole = torch.arange(24, dtype=torch.int32).view(6, 4)
    part = counter_random.element_numbers((2, 3), (3, 1), (6, 4), torch.device("cpu"))
    assert torch.equal(part, whole[3:5, 1:4])
