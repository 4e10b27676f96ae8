"""Several optimizers that are unscaled or clipped together: one norm, one factor, all step or none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_core import GradScaler

from ..drawn import examples


def parts(fused: bool, dtype: torch.dtype = torch.float32) -> tuple[list[torch.nn.Parameter], list[Any]]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(3, 2, dtype=dtype)) for _ in range(3)]
    return params, [
        torch.optim.SGD(params[:2], lr=0.1, fused=fused),
        torch.optim.AdamW(params[2:], lr=0.1, fused=fused),
    ]


@examples(40)
@given(
    fused=st.booleans(),
    max_norm=st.sampled_from([None, 0.1, 100.0]),
    unscaled=st.booleans(),
    bad=st.sampled_from([None, 0, 2]),
    without=st.sampled_from([None, 1, 2]),
)
def test_they_step_as_one_optimizer_of_all_parameters(
    fused: bool, max_norm: float | None, unscaled: bool, bad: int | None, without: int | None
) -> None:
    """One of them is clipped by its own norm, or steps although another skips."""
    params, optimizers = parts(fused)
    scaler = GradScaler("cpu", 8.0)
    before = [p.detach().clone() for p in params]
    scaler.scale(sum(p.square().sum() for p in params)).backward()
    if without is not None:
        params[without].grad = None
    if bad is not None and bad != without:
        params[bad].grad[0, 0] = math.nan
    skipped = bad is not None and bad != without
    grads = [None if p.grad is None else p.grad / 8.0 for p in params]
    if unscaled or max_norm is None:
        scaler.unscale_(optimizers)
    if max_norm is not None:
        norm = scaler.clip_grad_norm_(optimizers, max_norm)
        wanted = torch.nn.utils.get_total_norm([g for g in grads if g is not None])
        torch.testing.assert_close(norm, wanted, equal_nan=True)
        factor = 1.0 if skipped else min(1.0, max_norm / float(wanted + 1e-6))
        grads = [None if g is None else g * factor for g in grads]
    for param, grad in zip(params, grads, strict=True):
        torch.testing.assert_close(param.grad, grad, equal_nan=True)
    for optimizer in optimizers:
        scaler.step(optimizer)
        assert bool(scaler.landed(optimizer)) is not skipped
    scaler.update()
    assert scaler.get_scale() == (4.0 if skipped else 8.0)
    for param, old, grad in zip(params, before, grads, strict=True):
        assert torch.equal(param, old) is (skipped or grad is None)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [0, 2])
def test_an_overflow_that_unscaling_one_alone_found_counts_for_all(bad: int, fused: bool) -> None:
    """Gradients that were cleaned since are stepped on, or one optimizer steps and the other does not."""
    params, optimizers = parts(fused)
    scaler = GradScaler("cpu", 8.0)
    scaler.scale(sum(p.sum() for p in params)).backward()
    params[bad].grad[0, 0] = math.inf
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    params[bad].grad.nan_to_num_(posinf=0.0)
    scaler.clip_grad_norm_(optimizers, 1.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
        assert not scaler.landed(optimizer)


def test_the_record_says_that_another_optimizer_overflowed() -> None:
    """It blames parameters that it does not know."""
    params, optimizers = parts(fused=False)
    scaler = GradScaler("cpu", 8.0)
    scaler.scale(sum(p.sum() for p in params)).backward()
    params[0].grad[0, 0] = math.inf
    scaler.unscale_(optimizers)
    for optimizer in optimizers:
        scaler.step(optimizer)
    records = [str(scaler.last_step[optimizer]) for optimizer in optimizers]
    assert records == [
        "SGD skipped step 0: inf or NaN at scale 8 in parameter of shape (3, 2) (1 of 6)",
        "AdamW skipped step 0: inf or NaN at scale 8 in no parameter of this AdamW",
    ]


def test_what_cannot_step_as_one_is_refused() -> None:
    """A gradient is unscaled twice, or by the scale of another loss."""
    params, (first, second) = parts(fused=False)
    scaler = GradScaler("cpu", 8.0)
    scaler.scale(params[0].sum() + params[2].sum(), key="a").backward()
    scaler.scale(params[1].sum(), key="b").backward()
    again = torch.optim.SGD(params[2:], lr=0.1)
    for call in (scaler.unscale_, lambda *args, **kw: scaler.clip_grad_norm_(*args, 1.0, **kw)):
        with pytest.raises(ValueError, match="have a parameter in common"):
            call([second, again], key="a")
        with pytest.raises(ValueError, match="of 0 optimizers"):
            call([], key="a")
    scaler.unscale_(first, key="a")
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.clip_grad_norm_([first, second], 1.0, key="a")
    scaler.unscale_(second, key="b")
    with pytest.raises(ValueError, match="under the same key"):
        scaler.clip_grad_norm_([first, second], 1.0)


def test_a_disabled_scaler_clips_them_together() -> None:
    """Each is clipped by its own norm when scaling is turned off."""
    params, optimizers = parts(fused=False)
    scaler = GradScaler("cpu", enabled=False)
    sum(p.square().sum() for p in params).backward()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in params])
    scaler.unscale_(optimizers)
    torch.testing.assert_close(scaler.clip_grad_norm_(optimizers, 0.5), wanted)
    torch.testing.assert_close(torch.nn.utils.get_total_norm([p.grad for p in params]), torch.tensor(0.5))
