"""Finite gradients whose norm, or whose factor, float32 cannot hold."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from amp_core import GradScaler
from amp_core.scaling import grad_passes

from ..drawn import examples


def step(
    grads: list[torch.Tensor], scale: float, max_norm: float, fused: bool, norm_type: float = 2.0
) -> tuple[list[torch.Tensor], GradScaler, bool]:
    """Take one step of SGD with rate 1 from zero; return minus the change of each parameter."""
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
    scaler = GradScaler("cpu", scale)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer, max_norm=max_norm, norm_type=norm_type)
    scaler.update()
    return [-p.detach() for p in params], scaler, scaler.last_step[optimizer].skipped


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("exponent", [0, 16])
def test_the_step_has_the_norm_that_was_asked_for(exponent: int, dtype: torch.dtype, fused: bool) -> None:
    """The factor is computed from an infinite norm, and the step multiplies the gradients by 0."""
    if fused and dtype is torch.bfloat16:
        pytest.skip("torch's fused SGD does not step bfloat16 parameters on the CPU")
    grad = torch.full((8, 8), 2.0**127, dtype=dtype)
    (change,), scaler, skipped = step([grad], 2.0**exponent, 1.0, fused)
    assert not skipped
    assert float(change.double().norm()) == pytest.approx(1.0, rel=1e-2 if dtype is torch.bfloat16 else 1e-5)
    if exponent:  # else the norm is beyond float32, which a record then has for infinite
        assert scaler.history[-1].total_norm == pytest.approx(2.0 ** (127 + 3 - exponent), rel=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_float64_gradients_beyond_any_float32(fused: bool) -> None:
    """A norm that float64 holds and float32 does not, or neither, makes the factor 0."""
    for value in (1e200, 1e308):
        (change,), _, skipped = step([torch.full((64,), value, dtype=torch.float64)], 8.0, 1.0, fused)
        assert not skipped
        assert float(change.norm()) == pytest.approx(1.0)


@pytest.mark.parametrize("dtypes", [["float64"], ["float64", "float32"]], ids="+".join)
def test_a_scale_below_one_takes_gradients_beyond_float32(dtypes: list[str]) -> None:
    """A fused step on float64 weights is skipped, or one on float32 weights beside them is not."""
    grads = [torch.full((2,), 2.0**110, dtype=getattr(torch, dtype)) for dtype in dtypes]
    _, _, skipped = step(grads, 2.0**-20, 1.0, fused=True)
    assert skipped == ("float32" in dtypes)


def test_a_scale_below_one_leaves_unscaled_gradients() -> None:
    """A clipped step is skipped as if it would divide the gradients by the scale once more."""
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    scaler = GradScaler("cpu", 2.0**-120)
    scaler.scale((weight * 1000.0).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer, max_norm=1.0)
    assert weight.tolist() == pytest.approx([-0.5] * 4)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("exponent", "fits"), [(512, True), (1022, True), (1023, False)])
def test_only_the_squares_are_beyond_float64(exponent: int, fits: bool, fused: bool) -> None:
    """A scale below 1 makes finite gradients count as overflowed, because the norm sums their squares."""
    (change,), scaler, skipped = step([torch.tensor([2.0**exponent], dtype=torch.float64)], 0.5, 1.0, fused)
    assert (skipped, scaler.get_scale()) == (not fits, 0.5 if fits else 0.25)
    assert float(change) == pytest.approx(1.0 if fits else 0.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [0.0, 2.0**-60, 1.5, 2.0**900, math.inf])
@pytest.mark.parametrize("count", [1, 64])
def test_any_norm_may_be_asked_for(count: int, max_norm: float, fused: bool) -> None:
    """The quotient of two norms leaves float64: the step is silently 0, or divides by 0."""
    gradient = torch.full((count,), 2.0**1022, dtype=torch.float64)
    (change,), _, skipped = step([gradient], 1.0, max_norm, fused)
    assert not skipped
    if math.isinf(max_norm):
        assert torch.equal(change, gradient)
    else:
        assert float(change[0]) * math.sqrt(count) == pytest.approx(max_norm, rel=1e-6, abs=0)


@pytest.mark.parametrize("fused", [False, True])
def test_a_norm_that_float64_holds_leaves_float32_gradients_beside_it(fused: bool) -> None:
    """Gradients are divided until their norm is small, float32 ones to 0, though nothing is clipped."""
    grads = [torch.ones(3, dtype=torch.float64) * 1e100, torch.ones(3) * 0.25]
    changes, _, skipped = step(grads, 8.0, math.inf, fused)
    assert not skipped
    torch.testing.assert_close(changes, [grad / 8 for grad in grads])


@pytest.mark.parametrize("fused", [False, True])
def test_a_list_of_steps_keeps_norms_of_float64(fused: bool) -> None:
    """Reading what steps were skipped, which copies all records at once, makes such a norm inf."""
    _, scaler, _ = step([torch.full((4,), 1e200, dtype=torch.float64), torch.ones(2)], 1.0, 1.0, fused)
    assert scaler.history.skipped == []
    assert scaler.history[-1].total_norm == pytest.approx(2e200)


def test_a_norm_that_float32_holds_leaves_float16_gradients_of_another_optimizer() -> None:
    """The squares of norms are beyond float32, so gradients are divided, float16 ones to 0."""
    grads = [torch.full((2,), 2e38), torch.full((2,), 3.0, dtype=torch.float16), torch.ones(2)]
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizers = [torch.optim.SGD(params[:1]), torch.optim.SGD(params[1:])]
    scaler = GradScaler("cpu", 1.0, allow_fp16_gradients=True)
    scaler.scale(torch.ones(()))
    assert float(scaler.clip_grad_norm_(optimizers, math.inf)) == pytest.approx(2e38 * math.sqrt(2))
    assert all(torch.equal(param.grad, grad) for param, grad in zip(params, grads, strict=True))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_among_large_gradients_is_skipped(value: float, fused: bool) -> None:
    """Bringing large gradients into range hides that one of them is not finite."""
    grad = torch.full((8, 8), 2.0**127)
    grad[3, 3] = value
    (change,), scaler, skipped = step([grad], 65536.0, 1.0, fused)
    assert skipped
    assert not change.any()
    assert scaler.get_scale() == 32768.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_device_that_the_host_cannot_read_skips_the_step(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody waits for the norm, the step is silently 0 and the scale stays too high."""
    monkeypatch.setattr(grad_passes, "on_host", lambda *_: False)
    (change,), scaler, skipped = step([torch.full((8, 8), 2.0**127)], 65536.0, 1.0, fused)
    assert skipped
    assert not change.any()
    assert scaler.get_scale() == 32768.0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_that_such_a_device_cannot_hold_skips_the_step(
    dtype: torch.dtype, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients are multiplied by 0 or divided by inf, and the step is silently 0."""
    monkeypatch.setattr(grad_passes, "on_host", lambda *_: False)
    grad = torch.full((8, 8), 2.0**120, dtype=dtype)
    (change,), _, skipped = step([grad], 65536.0, 2.0**-30, fused)
    assert skipped
    (change,), _, skipped = step([grad], 65536.0, 0.0, fused)
    assert not skipped  # no step is what a norm of 0 asks for
    assert not change.any()


MAGNITUDES = {torch.float32: (-60, 127), torch.float64: (-60, 1023)}


@examples(150)
@given(data=st.data())
def test_any_magnitude_as_in_wide_arithmetic(data: st.DataObject) -> None:
    """Some combination of magnitude, scale, norm and kind of optimizer is clipped to another norm."""
    dtype = data.draw(st.sampled_from(list(MAGNITUDES)))
    exponents = st.integers(*MAGNITUDES[dtype])
    top = data.draw(exponents)
    grads = [
        torch.ldexp(torch.ones(size, dtype=dtype), torch.tensor(float(top - data.draw(st.integers(0, 8)))))
        for size in data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    ]
    scale = 2.0 ** data.draw(st.integers(-20, 40))
    max_norm = 2.0 ** data.draw(st.integers(-60, 40))
    norm_type = data.draw(st.sampled_from([1.0, 2.0, 3.0, math.inf]))
    fused = data.draw(st.booleans())
    if not all(bool(g.isfinite().all()) for g in grads):
        return
    changes, _, skipped = step(grads, scale, max_norm, fused, norm_type)
    wide = [g.numpy().astype(np.longdouble) / np.longdouble(scale) for g in grads]
    flat = np.concatenate(wide)
    norm = (
        np.abs(flat).max() if math.isinf(norm_type) else (np.abs(flat) ** norm_type).sum() ** (1 / norm_type)
    )
    share = min(np.longdouble(1.0), np.longdouble(max_norm) / (norm + np.longdouble(1e-6)))
    if norm > torch.finfo(dtype).max and scale < 1.0:  # elements may have left the dtype, too
        assert skipped
        return
    assert not skipped, (top, scale, max_norm)
    for change, true in zip(changes, wide, strict=True):
        wanted = torch.from_numpy((true * share).astype(np.float64)).to(dtype)
        torch.testing.assert_close(change, wanted, rtol=2e-5, atol=1e-37)


def test_no_gradients_are_kept_by_a_clipped_step() -> None:
    """Memory of gradients that zero_grad has let go is held until the next update."""
    import weakref

    for fused in (False, True):
        param = torch.nn.Parameter(torch.ones(3))
        optimizer, scaler = torch.optim.SGD([param], lr=0.1, fused=fused), GradScaler("cpu")
        for call in (scaler.step, scaler.clip_grad_norm_):
            scaler.scale(param.sum()).backward()
            grad = weakref.ref(param.grad)
            call(optimizer, max_norm=1.0)
            optimizer.zero_grad()
            assert grad() is None, (fused, call)
            scaler.update()
