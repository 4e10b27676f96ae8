"""Scales, schedules and saved states that cannot be right are refused whole."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from amp_core import GradScaler, LossScaleSchedule
from amp_core.states.loss_scale import float32

from ..drawn import examples

UNFIT = [1e300, 1e-60, 10**400, math.inf, math.nan, 0.0, -1.0]


@pytest.mark.parametrize("value", UNFIT)
def test_a_scale_that_float32_cannot_hold(value: float) -> None:
    """It is taken, and becomes 0 or inf, or fails at the first loss."""
    with pytest.raises(ValueError, match="must be positive and finite"):
        GradScaler("cpu", init_scale=value)
    scaler = GradScaler("cpu", 8.0)
    scaler.scale(torch.ones(()))
    news: list[Any] = [value] if value == 10**400 else [value, torch.tensor(value, dtype=torch.float64)]
    for new in news:
        with pytest.raises(ValueError, match="must be positive and finite"):
            scaler.update(new)
    state = {**scaler.state_dict(), "scale": value}
    with pytest.raises(ValueError, match="must be positive and finite"):
        scaler.load_state_dict(state)
    assert scaler.get_scale() == 8.0
    if value not in (math.inf,):
        with pytest.raises(ValueError, match=r"floor of the scale|positive and finite"):
            LossScaleSchedule(min_scale=float("inf") if value == 10**400 else value)
    with pytest.raises(ValueError, match="must be positive and finite"):
        LossScaleSchedule.constant(value)
    if value == 10**400:
        with pytest.raises(ValueError, match="growth factor inf is not finite"):
            scaler.load_state_dict({**scaler.state_dict(), "growth_factor": value})


def test_the_largest_scale() -> None:
    """3.4028235e38, as torch.finfo prints float32's largest number, is taken, and fails at the first loss."""
    largest = torch.finfo(torch.float32).max
    assert largest < 3.4028235e38
    schedule = LossScaleSchedule(min_scale=3.4028235e38)
    for scaler in (GradScaler("cpu", 3.4028235e38), GradScaler("cpu", schedule=schedule)):
        scaler.scale(torch.ones(()))
        scaler.update(3.4028235e38)
        scaler.load_state_dict({**scaler.state_dict(), "scale": 3.4028235e38})
        assert scaler.get_scale() == largest


@pytest.mark.parametrize("value", ["large", None, [1.0, 2.0], 1j, torch.ones(2)])
def test_a_scale_that_is_no_number(value: Any) -> None:
    """It ends in an AttributeError, or in an error about Python."""
    with pytest.raises(TypeError, match="init_scale= must be a number"):
        GradScaler("cpu", init_scale=value)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(TypeError, match="The saved scale must be a number"):
        scaler.load_state_dict({**scaler.state_dict(), "scale": value})
    with pytest.raises(TypeError, match="growth_factor must be a number"):
        LossScaleSchedule(growth_factor=value)


@pytest.mark.parametrize("state", [None, 3, "state", [("scale", 1.0)]])
def test_a_state_that_is_no_mapping(state: Any) -> None:
    """It ends in an AttributeError."""
    with pytest.raises(TypeError, match="must be a mapping"):
        GradScaler("cpu").load_state_dict(state)


VALUES = st.sampled_from([None, "x", [], {}, {"a": 1}, -1, 2**40, 1.5, math.nan, math.inf, 1e300, 1e-60, 1j])


@examples(300)
@given(data=st.data())
def test_any_wrong_entry_is_refused_and_changes_nothing(data: st.DataObject) -> None:
    """Some entry of some type is half loaded, or ends in an error about Python's own attributes."""
    schedule = LossScaleSchedule(min_scale=2.0, hysteresis=2)
    scaler = GradScaler("cpu", 8.0, schedule=schedule)
    scaler.scale(torch.ones(()))
    scaler.scale(torch.ones(()), key="k")
    before = scaler.state_dict()
    state = copy.deepcopy(before)
    place = state
    if data.draw(st.booleans()):
        place = state["_keys"]["k"]
    if data.draw(st.booleans()) and "_schedule" in place:
        place = place["_schedule"]
    entry = data.draw(st.sampled_from([*place, "_keys"] if place is state else [*place]))
    place[entry] = data.draw(VALUES)
    try:
        scaler.load_state_dict(state)
    except (TypeError, ValueError, KeyError, AssertionError):
        assert scaler.state_dict() == before
    else:
        loaded = scaler.state_dict()
        assert 0.0 < float32(loaded["scale"]) < math.inf
        scaler.scale(torch.ones(()), key="k")


def test_a_hysteresis_beyond_int32() -> None:
    """The first loss raises, or the scaler does not load its own state."""
    scaler = GradScaler("cpu", 8.0, schedule=LossScaleSchedule(hysteresis=2**40))
    scaler.scale(torch.ones(()))
    saved = scaler.state_dict()
    assert saved["_hysteresis_left"] == 2**31 - 1
    scaler.load_state_dict(saved)
    scaler.load_state_dict({name: value for name, value in saved.items() if name != "_hysteresis_left"})
    assert scaler.state_dict() == saved


def test_repr_says_what_the_scaler_does() -> None:
    """Printing a scaler in a notebook shows an address."""
    scaler = GradScaler("cpu", 8.0)
    assert repr(scaler) == "GradScaler('cpu', scale=8, 0 steps in history)"
    scaler.scale(torch.ones(()))
    scaler.scale(torch.ones(()), key="g")
    scaler.update(2.0, key="g")
    assert repr(scaler) == "GradScaler('cpu', scale=8, scale['g']=2, 0 steps in history)"
    assert repr(GradScaler("cpu", enabled=False)) == "GradScaler('cpu', enabled=False)"


@pytest.mark.parametrize("size", [2**70, None])
def test_a_history_longer_than_memory(size: int | None) -> None:
    """A number of steps that stands for "all" ends in an OverflowError of Python's deque."""
    scaler = GradScaler("cpu", history=size)
    assert pickle.loads(pickle.dumps(scaler)).history.size == scaler.history.size
