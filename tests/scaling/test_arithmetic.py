"""The factor of a step: the host's arithmetic against torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from amp_core.scaling import arithmetic
from amp_core.scaling.arithmetic import (
    any_of,
    clip_on_host,
    inverse_of,
    overflows,
    reciprocal,
    unscale_and_clip,
)
from amp_core.states.loss_scale import float32

from ..drawn import examples

T = TypeVar("T")
POSITIVE = st.floats(0.0, math.inf, width=32, allow_nan=False, exclude_min=True)
NORMS = st.floats(0.0, math.inf, width=32) | st.just(math.nan)
DTYPES = st.sampled_from([torch.float32, torch.float64])


def here_and_there(call: Callable[[], T]) -> tuple[T, T]:
    """Return what `call` gives where the host reads the numbers, and where torch's operations do."""
    here = call()
    with patch.object(arithmetic, "on_host", lambda *_: False):
        return here, call()


@examples(300)
@given(scale=POSITIVE)
def test_the_reciprocal_is_torchs(scale: float) -> None:
    """Gradients that are unscaled on the CPU differ from torch's in the last bit."""
    ours = reciprocal(torch.tensor(scale))
    assert torch.equal(ours, torch.tensor(scale).double().reciprocal().float())


@pytest.mark.parametrize("as_divisor", [False, True])
@examples(300)
@given(norm=NORMS, scale=POSITIVE, max_norm=st.floats(0.0, math.inf, width=32), dtype=DTYPES)
@example(norm=12799968.0, scale=3.7615725186765134e-32, max_norm=35.0, dtype=torch.float32)
def test_the_host_clips_as_a_device_does(
    as_divisor: bool, norm: float, scale: float, max_norm: float, dtype: torch.dtype
) -> None:
    """A step on the CPU, fused or not, is clipped otherwise than one on a GPU, or divides by zero."""
    numbers = torch.tensor(norm, dtype=dtype), torch.tensor(scale)
    true, factor = clip_on_host(norm, scale, inverse_of(scale), max_norm, as_divisor=as_divisor)
    here = torch.tensor(true, dtype=dtype), torch.tensor(float32(factor))
    with patch.object(arithmetic, "on_host", lambda *_: False):
        there = unscale_and_clip(*numbers, max_norm, as_divisor=as_divisor)
    torch.testing.assert_close(here[0], there[0], rtol=0, atol=0, equal_nan=True)
    assert here[1].dtype is there[1].dtype is torch.float32
    if float(here[0]) == math.inf > norm:
        return  # no tensor holds this norm: gradients are brought into range first, or the step is skipped
    # What tensors lose of coefficients below float32.
    lost = 1e-44 if as_divisor else 1e-37 * min(float(reciprocal(numbers[1])), 1e38) + 1e-37
    share = 1.0 if math.isnan(norm) or not float(here[0]) else max_norm / float(here[0])
    if share > 1e-37 or not as_divisor:
        torch.testing.assert_close(here[1], there[1], rtol=1e-6, atol=lost, equal_nan=True)


@examples(500)
@given(
    norm=NORMS,
    scale=POSITIVE | st.floats(2.0**-130, 2.0**-120, width=32),
    dtype=DTYPES,
)
@example(norm=math.inf, scale=1.0, dtype=torch.float32)  # of finite gradients: nothing overflows
def test_the_host_sees_the_overflow_of_a_device(norm: float, scale: float, dtype: torch.dtype) -> None:
    """With a tiny scale a fused step on the CPU writes infinities that one on a GPU skips."""
    numbers = torch.tensor(norm, dtype=dtype), torch.tensor(scale)
    here, there = here_and_there(lambda: overflows(*numbers))
    assert there is not None
    assert (0.0 if here is None else here.item()) == there.item()


@examples()
@given(values=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=4))
def test_the_host_joins_flags_as_a_device_does(values: list[float]) -> None:
    """One of several overflows is lost, or a flag is counted twice."""
    flags = [torch.tensor(value) for value in values]
    here, there = here_and_there(lambda: any_of(flags))
    torch.testing.assert_close(here, there, rtol=0, atol=0)
    assert here.item() == max(values)


def test_flags_of_one_element_that_are_no_scalars() -> None:
    """A library that leaves a flag of shape (1,) beside ours fails in the comparison."""
    assert any_of([torch.zeros(1), torch.ones(())]).item() == 1.0


def test_a_scale_of_zero_is_no_error() -> None:
    """A scale that another program wrote raises ZeroDivisionError here and is inf elsewhere."""
    zero = torch.tensor(0.0)
    here, there = here_and_there(
        lambda: (reciprocal(zero), unscale_and_clip(torch.tensor(1.0), zero, 1.0)[0])
    )
    on_host, _ = clip_on_host(1.0, 0.0, inverse_of(0.0), 1.0, as_divisor=False)
    assert [*map(float, here), on_host] == [*map(float, there), on_host] == [math.inf] * 3


def test_reciprocals_of_old_scales_are_dropped() -> None:
    """Two threads add one at once, the cache is larger than its limit, and it grows for good."""
    arithmetic._inverses.update({-float(i): torch.ones(()) for i in range(arithmetic._INVERSES + 1)})
    reciprocal(torch.tensor(3.0))
    assert len(arithmetic._inverses) <= arithmetic._INVERSES
