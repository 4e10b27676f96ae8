"""The factor of a step: the host's arithmetic against torch's."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_core.scaler import arithmetic
from amp_core.scaler.arithmetic import clip_coefficient, reciprocal, unscale_and_clip

POSITIVE = st.floats(0.0, math.inf, width=32, allow_nan=False, exclude_min=True)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(scale=POSITIVE)
def test_the_reciprocal_is_torchs(scale: float) -> None:
    """Gradients that are unscaled on the CPU differ from torch's in the last bit."""
    ours = reciprocal(torch.tensor(scale))
    assert torch.equal(ours, torch.tensor(scale).double().reciprocal().float())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    norm=st.floats(0.0, math.inf, width=32) | st.just(math.nan),
    scale=POSITIVE,
    max_norm=st.floats(0.0, math.inf, width=32),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_host_computes_what_a_device_does(
    norm: float, scale: float, max_norm: float, dtype: torch.dtype
) -> None:
    """A step on the CPU is clipped otherwise than one on a GPU, or divides by zero."""
    given_norm, given_scale = torch.tensor(norm, dtype=dtype), torch.tensor(scale)
    true, factor = unscale_and_clip(given_norm, given_scale, max_norm)
    inverse = given_scale.double().reciprocal().float()
    expected = given_norm * inverse
    torch.testing.assert_close(true, expected, rtol=0, atol=0, equal_nan=True)
    by = (inverse * clip_coefficient(expected, max_norm).nan_to_num(nan=1.0)).float()
    least = 1e-37 * min(float(inverse), 1e38) + 1e-37  # what tensors lose of coefficients below float32
    torch.testing.assert_close(factor, by, rtol=1e-6, atol=least, equal_nan=True)


def test_a_scale_of_zero_is_no_error(monkeypatch) -> None:
    """A scale that another program wrote raises ZeroDivisionError here and is inf elsewhere."""
    zero = torch.tensor(0.0)
    here = reciprocal(zero), *unscale_and_clip(torch.tensor(1.0), zero, 1.0)
    monkeypatch.setattr(arithmetic, "_is_at_hand", lambda *_: False)
    there = reciprocal(zero), *unscale_and_clip(torch.tensor(1.0), zero, 1.0)
    assert [float(n) for n in here[:2]] == [float(n) for n in there[:2]] == [math.inf, math.inf]
