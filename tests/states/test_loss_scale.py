"""The pure state machines: the loss scale and the stages of an optimizer."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import amp_core
from amp_core.kernels import PORTABLE, Kernels, ScaleTensors
from amp_core.states.loss_scale import (
    Hysteresis,
    LossScaleSchedule,
    OptState,
    ScaleState,
    float32,
    next_scale,
    next_stage,
)

from ..drawn import examples

B, C, E = Hysteresis.BUDGET, Hysteresis.CONSECUTIVE, Hysteresis.EVERY


def run(found: list[bool], schedule: LossScaleSchedule, scale: float = 2.0**16) -> ScaleState:
    state = ScaleState(scale, 0, schedule.hysteresis)
    for flag in found:
        state = next_scale(state, flag, schedule)
    return state


@pytest.mark.parametrize(
    ("found", "none", "budget", "consecutive", "every"),
    [
        ([True] * 6, 2.0**10, 2.0**11, 2.0**11, 2.0**13),
        ([True, False] * 6, 2.0**10, 2.0**11, 2.0**16, 2.0**16),
        ([True] * 3 + [False] * 5 + [True] * 3, 2.0**10, 2.0**11, 2.0**12, 2.0**14),
    ],
)
def test_three_meanings_of_hysteresis(
    found: list[bool], none: float, budget: float, consecutive: float, every: float
) -> None:
    """A hysteresis of two means something else than in Megatron, DeepSpeed, apex or Paddle."""
    assert run(found, LossScaleSchedule(growth_interval=1000)).scale == none
    for kind, expected in ((B, budget), (C, consecutive), (E, every)):
        schedule = LossScaleSchedule(growth_interval=1000, hysteresis=2, hysteresis_kind=kind)
        assert run(found, schedule).scale == expected


def test_floor_ceiling_and_overflow_of_float32() -> None:
    """The scale leaves the range that was given for it, or becomes infinite."""
    bounded = LossScaleSchedule(growth_interval=1, min_scale=4.0, max_scale=32.0)
    assert run([True] * 9, bounded, 16.0).scale == 4.0
    assert run([False] * 9, bounded, 16.0).scale == 32.0
    assert run([False] * 300, LossScaleSchedule(growth_interval=1)).scale == 2.0**127
    assert run([True] * 300, LossScaleSchedule()).scale == 2.0**-126


schedules = st.builds(
    LossScaleSchedule,
    growth_factor=st.sampled_from([2.0, 1.1, 1.0001, 3.7]),
    backoff_factor=st.sampled_from([0.5, 0.3, 0.999]),
    growth_interval=st.integers(1, 4),
    min_scale=st.sampled_from([2.0**-126, 1.0, 100.0]),
    max_scale=st.sampled_from([math.inf, 1e6]),
    hysteresis=st.integers(1, 3),
    hysteresis_kind=st.sampled_from(list(Hysteresis)),
)
programs = st.lists(st.booleans(), min_size=1, max_size=30)
scales = st.sampled_from([1.0, 65536.0, 3000.0, 2.0**-120, 2.0**127])


@given(programs, schedules, scales)
@examples(150)
def test_kernels_agree_bit_for_bit(found: list[bool], schedule: LossScaleSchedule, scale: float) -> None:
    """A kernel moves the scale elsewhere than the documented rule."""
    for kernels in (PORTABLE, amp_core.get_backend("cpu").kernels()):
        _agree(kernels, found, schedule, scale)


def _agree(kernels: Kernels, found: list[bool], schedule: LossScaleSchedule, scale: float) -> None:
    state = ScaleState(float32(scale), 0, schedule.hysteresis)
    tensors = ScaleTensors(
        torch.tensor(scale),
        torch.tensor(0, dtype=torch.int32),
        torch.tensor(schedule.hysteresis, dtype=torch.int32),
    )
    for flag in found:
        state = next_scale(state, flag, schedule)
        kernels.update_scale_(tensors, torch.tensor(float(flag)), schedule)
        assert (tensors.scale.item(), tensors.growth_tracker.item(), tensors.hysteresis_left.item()) == (
            state.scale,
            state.growth_tracker,
            state.hysteresis_left,
        )


@given(programs, st.sampled_from([2.0, 1.1, 3.7]), st.sampled_from([0.5, 0.3]), st.integers(1, 4))
@examples(60)
def test_default_schedule_is_torchs(found: list[bool], growth: float, backoff: float, interval: int) -> None:
    """The scale moves otherwise than torch's kernel moves it."""
    schedule = LossScaleSchedule(growth, backoff, interval)
    state = ScaleState(3000.0)
    scale, tracker = torch.tensor(3000.0), torch.tensor(0, dtype=torch.int32)
    for flag in found:
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(flag)), growth, backoff, interval)
        state = next_scale(state, flag, schedule)
        assert (state.scale, state.growth_tracker) == (scale.item(), tracker.item())


def test_stages_of_an_optimizer() -> None:
    """A call is allowed in the wrong stage, or refused in the right one."""
    ready, unscaled, stepped = OptState
    assert next_stage(ready, "unscale_") is unscaled
    assert next_stage(ready, "step") is stepped
    assert next_stage(unscaled, "step") is stepped
    for stage, call, text in (
        (unscaled, "unscale_", "already been called on this optimizer"),
        (stepped, "unscale_", "being called after step"),
        (stepped, "step", "already been called since the last update"),
    ):
        with pytest.raises(RuntimeError, match=text):
            next_stage(stage, call)
