"""The scaler states of torch, DeepSpeed, Megatron, apex and Paddle, read and written.

The classes below follow the rules that the sources of these systems state (named in
`amp_core.scaling.checkpoint_layouts`), so that it can be seen whether a run that changes systems goes
on as it would have. They are written anew; none of the systems but torch is installed where the tests run.
"""

from __future__ import annotations

import math
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_core import AtFloor, GradScaler, Hysteresis, LossScaleSchedule, convert_scaler_state

from ..drawn import examples

WINDOW = 3


class Megatron:
    def __init__(self) -> None:
        self.scale, self.grown, self.budget = 2.0**10, 0, 2
        self.schedule = LossScaleSchedule(growth_interval=WINDOW, min_scale=1.0, hysteresis=2)

    def step(self, overflow: bool) -> None:
        if overflow:
            self.grown, self.budget = 0, self.budget - 1
            if self.budget <= 0:
                self.scale = max(self.scale * 0.5, 1.0)
            return
        self.grown += 1
        if self.grown == WINDOW:
            self.grown, self.budget, self.scale = 0, 2, self.scale * 2

    def state(self) -> dict[str, Any]:
        scale = torch.tensor([self.scale])
        return {"scale": scale, "growth_tracker": self.grown, "hysteresis_tracker": self.budget}

    def load(self, state: dict[str, Any]) -> None:
        self.scale, self.grown = state["scale"].item(), state["growth_tracker"]
        self.budget = state["hysteresis_tracker"]


class DeepSpeed:
    schedule = None
    consecutive = False

    def __init__(self) -> None:
        self.held: dict[str, Any] = {
            "cur_scale": 2.0**10, "dynamic": True, "cur_iter": 0, "last_overflow_iter": -1,
            "scale_factor": 2.0, "scale_window": WINDOW, "min_scale": 1, "delayed_shift": 2,
            "cur_hysteresis": 2, "consecutive_hysteresis": self.consecutive,
            "raise_error_at_min_scale": False,
        }  # fmt: skip

    @property
    def scale(self) -> float:
        return float(self.held["cur_scale"])

    def step(self, overflow: bool) -> None:
        held = self.held
        if overflow:
            if held["cur_hysteresis"] == 1:
                held["cur_scale"] = max(held["cur_scale"] / 2.0, held["min_scale"])
            else:
                held["cur_hysteresis"] -= 1
            held["last_overflow_iter"] = held["cur_iter"]
        else:
            grows = (held["cur_iter"] - held["last_overflow_iter"]) % WINDOW == 0
            if self.consecutive or grows:
                held["cur_hysteresis"] = held["delayed_shift"]
            held["cur_scale"] *= 2.0 if grows else 1.0
        held["cur_iter"] += 1

    def state(self) -> dict[str, Any]:
        return {"loss_scaler": types.SimpleNamespace(**self.held), "dynamic_loss_scale": True}

    def load(self, state: dict[str, Any]) -> None:
        assert state.keys() == self.held.keys()
        self.held.update(state)


class DeepSpeedConsecutive(DeepSpeed):
    consecutive = True


class Apex:
    def __init__(self) -> None:
        self.scale, self.unskipped = 2.0**10, 0
        self.schedule = LossScaleSchedule(growth_interval=WINDOW, max_scale=2.0**24)

    def step(self, overflow: bool) -> None:
        self.unskipped = 0 if overflow else self.unskipped + 1
        if overflow:
            self.scale /= 2
        elif self.unskipped == WINDOW:
            self.scale, self.unskipped = min(2.0**24, self.scale * 2), 0

    def state(self) -> dict[str, Any]:
        return {"loss_scaler0": {"loss_scale": self.scale, "unskipped": self.unskipped}}

    def load(self, state: dict[str, Any]) -> None:
        self.scale, self.unskipped = state["loss_scaler0"].values()


class Paddle:
    schedule = None

    def __init__(self) -> None:
        self.held: dict[str, Any] = {
            "scale": [2.0**10], "incr_ratio": 2.0, "decr_ratio": 0.5, "incr_every_n_steps": WINDOW,
            "decr_every_n_nan_or_inf": 2, "incr_count": 0, "decr_count": 0,
            "use_dynamic_loss_scaling": True,
        }  # fmt: skip

    @property
    def scale(self) -> float:
        return float(self.held["scale"][0])

    def step(self, overflow: bool) -> None:
        count, other, limit, ratio = (
            ("decr_count", "incr_count", 2, 0.5) if overflow else ("incr_count", "decr_count", WINDOW, 2.0)
        )
        self.held[other] = 0
        self.held[count] += 1
        if self.held[count] == limit:
            self.held["scale"] = [max(self.scale * ratio, 1.0)]
            self.held[count] = 0

    def state(self) -> dict[str, Any]:
        return {**self.held, "scale": torch.tensor(self.held["scale"]).numpy()}

    def load(self, state: dict[str, Any]) -> None:
        assert state.keys() == self.held.keys()
        self.held.update(state)


class Torch:
    """torch's own, the real one."""

    schedule = None

    def __init__(self, cls: type = torch.amp.GradScaler, **options: Any) -> None:
        self.scaler = cls("cpu", 2.0**10, **(options or {"growth_interval": WINDOW}))
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.0)

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def step(self, overflow: bool) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.parameter.sum()).backward()
        if overflow:
            self.parameter.grad.fill_(math.inf)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)


SYSTEMS = {
    "apex": Apex, "deepspeed": DeepSpeed, "deepspeed consecutive": DeepSpeedConsecutive,
    "megatron": Megatron, "paddle": Paddle, "torch": Torch,
}  # fmt: skip
events = st.lists(st.booleans(), max_size=14)


@pytest.mark.filterwarnings("ignore::amp_core.ScaleFloorWarning")
@pytest.mark.parametrize("name", SYSTEMS)
@examples(60)
@given(before=events, between=events, after=events)
def test_a_run_that_changes_systems_and_back_goes_on_as_it_would_have(
    name: str, before: list[bool], between: list[bool], after: list[bool]
) -> None:
    """After a change of systems the scale moves at other steps, or by other rules."""
    theirs = SYSTEMS[name]()
    for overflow in before:
        theirs.step(overflow)
    state = convert_scaler_state(theirs.state(), schedule=theirs.schedule)
    ours = Torch(GradScaler, warn_after=0)
    ours.load(state)
    for overflow in between:
        theirs.step(overflow)
        ours.step(overflow)
        assert ours.scale == theirs.scale
    back = SYSTEMS[name]()
    back.load(convert_scaler_state(ours.state(), to=name.split(maxsplit=1)[0], lossy=True))
    for overflow in after:
        theirs.step(overflow)
        back.step(overflow)
        assert back.scale == theirs.scale


def test_each_system_says_what_it_has_no_place_for() -> None:
    """A part of the schedule is lost without a word."""
    scaler = GradScaler("cpu", schedule=LossScaleSchedule(max_scale=2.0**20, hysteresis=3))
    for to, text in {
        "torch": r"hysteresis=3; max_scale=1048576\.0",
        "apex": "apex has no place for hysteresis=3",
        "paddle": "hysteresis=3 as budget",
        "megatron": "max_scale",
        "deepspeed": "max_scale",
    }.items():
        with pytest.raises(ValueError, match=text + r".*Pass lossy=True"):
            convert_scaler_state(scaler.state_dict(), to=to)
        assert convert_scaler_state(scaler.state_dict(), to=to, lossy=True)
    assert convert_scaler_state(scaler.state_dict()) == scaler.state_dict()
    slow = GradScaler("cpu", backoff_factor=0.25).state_dict()
    for to in ("apex", "deepspeed"):  # which lower the scale by the factor by which it grows
        with pytest.raises(ValueError, match=r"no place for backoff_factor=0\.25"):
            convert_scaler_state(slow, to=to)
    assert convert_scaler_state(slow, to="torch")["backoff_factor"] == 0.25
    floor = GradScaler("cpu", schedule=LossScaleSchedule(2.0, 0.25, min_scale=1.0, hysteresis_kind="every"))
    assert convert_scaler_state(floor.state_dict(), to="paddle")["decr_ratio"] == 0.25


def test_several_losses() -> None:
    """Apex's scales of several losses are lost, or mixed up."""
    theirs = {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(3)}
    ours = convert_scaler_state(theirs)
    assert convert_scaler_state(ours, to="apex") == theirs
    scaler = GradScaler("cpu")
    scaler.load_state_dict(ours)
    assert [scaler.get_scale(key) for key in (None, "1", "2")] == [1.0, 2.0, 4.0]
    with pytest.raises(ValueError, match=r"max_scale=.*; the scales of the keys '1', '2'\."):
        convert_scaler_state(ours, to="torch")


def test_scales_of_several_losses_keep_their_numbers() -> None:
    """A file that sorts its entries by name, 10 before 2, makes losses swap their scales."""
    names = [f"loss_scaler{i}" for i in range(12)]
    theirs = {name: {"loss_scale": 2.0**i, "unskipped": i} for i, name in enumerate(names)}
    for order in (sorted(names), names[::-1]):
        for ours in (shuffled := {name: theirs[name] for name in order}, convert_scaler_state(shuffled)):
            back = convert_scaler_state(ours, to="apex")
            assert back == theirs
            assert [*back] == names
    with pytest.raises(KeyError, match="no entry 'loss_scaler0'"):
        convert_scaler_state({"loss_scaler1": theirs["loss_scaler1"]}, source="apex")


def test_a_hysteresis_beyond_int32() -> None:
    """A state that leaves out how many overflows are left is refused."""
    schedule = LossScaleSchedule(hysteresis=2**40)
    converted = convert_scaler_state(torch.amp.GradScaler("cpu").state_dict(), schedule=schedule)
    assert converted["_hysteresis_left"] == 2**31 - 1


def test_what_real_checkpoints_hold_around_it() -> None:
    """The state inside an optimizer's is not found, or an option of DeepSpeed's is lost."""
    megatron = {"optimizer": {}, "grad_scaler": Megatron().state()}
    assert convert_scaler_state(megatron)["growth_interval"] == 1000
    legacy = {"dynamic_loss_scale": True, "cur_scale": 8.0, "cur_iter": 5, "last_overflow_iter": 2,
              "scale_factor": 4.0, "scale_window": 10, "fp32_groups": []}  # fmt: skip
    read = convert_scaler_state(legacy)
    assert (read["_growth_tracker"], read["growth_factor"], read["backoff_factor"]) == (2, 4.0, 0.25)
    strict = DeepSpeed()
    strict.held["raise_error_at_min_scale"] = True
    scaler = GradScaler("cpu")
    scaler.load_state_dict(convert_scaler_state(strict.state()))
    assert scaler.schedule.at_floor is AtFloor.RAISE
    assert scaler.schedule.hysteresis_kind is Hysteresis.BUDGET


@pytest.mark.parametrize(
    "state",
    [{"cur_scale": 64.0, "dynamic_loss_scale": False, "cur_iter": 3},
     {**Paddle().state(), "scale": [64.0], "use_dynamic_loss_scaling": False}],
)  # fmt: skip
def test_scales_that_do_not_move(state: dict[str, Any]) -> None:
    """A static scale begins to move."""
    ours = Torch(GradScaler)
    ours.load(convert_scaler_state(state))
    for overflow in (True, False, True, True):  # Paddle waits for two in a row
        ours.step(overflow)
    assert ours.scale == 64.0
    to = "paddle" if "incr_ratio" in state else "deepspeed"
    again = convert_scaler_state(convert_scaler_state(ours.state(), to=to))
    assert again["scale"] == 64.0


def test_a_schedule_with_fewer_overflows_than_were_counted() -> None:
    """The state has a negative count, which no scaler loads."""
    rule = LossScaleSchedule(hysteresis=2, hysteresis_kind=Hysteresis.EVERY)
    saved = {**Paddle().state(), "scale": [64.0], "decr_every_n_nan_or_inf": 5, "decr_count": 4}
    ours = Torch(GradScaler)
    ours.load(convert_scaler_state(saved, schedule=rule))
    ours.step(overflow=True)
    assert ours.scale == 32.0


@pytest.mark.parametrize("number", [torch.tensor, np.float32])
def test_factors_that_torch_saves_as_they_were_given(number: Any) -> None:
    """A state that load_state_dict takes is refused: torch saves a factor as the tensor that it was given."""
    saved = torch.amp.GradScaler("cpu", 8.0, number(4.0), number(0.25)).state_dict()
    ours = GradScaler("cpu")
    ours.load_state_dict(saved)
    assert convert_scaler_state(saved) == ours.state_dict()


@pytest.mark.parametrize("to", ["torch", "deepspeed", "paddle"])
def test_an_interval_beyond_int32(to: str) -> None:
    """A scale that is never to grow, with an interval that torch takes, cannot change systems."""
    saved = torch.amp.GradScaler("cpu", 8.0, growth_interval=10**10).state_dict()
    there = convert_scaler_state(saved, to=to, lossy=True)
    assert convert_scaler_state(there)["growth_interval"] == 10**10


@pytest.mark.parametrize("state", [{}, {"scale": 1.0}, {"loss_scaler": 3}])
def test_states_of_no_system(state: Any) -> None:
    """Something else is taken for a state, or refused without saying what it is."""
    with pytest.raises(ValueError, match="scaler state of no known system"):
        convert_scaler_state(state)


@pytest.mark.parametrize("source", [None, "torch"])
@pytest.mark.parametrize("state", [5, [1.0], None])
def test_what_is_no_state(state: Any, source: str | None) -> None:
    """What is no state at all is called the state of an unknown system."""
    with pytest.raises(TypeError, match="must be a mapping, got"):
        convert_scaler_state(state, source=source)


def test_wrong_names_and_values() -> None:
    """A misspelt system or an impossible scale is taken."""
    with pytest.raises(ValueError, match="Unknown system 'keras'; the systems are 'amp_core', 'apex'"):
        convert_scaler_state(GradScaler("cpu").state_dict(), to="keras")
    with pytest.raises(ValueError, match="positive and finite"):
        convert_scaler_state({"loss_scaler0": {"loss_scale": 0.0, "unskipped": 0}})
    for wrong, error in ((0.0, ValueError), ("2", TypeError)):
        with pytest.raises(error, match="growth_factor must be"):
            convert_scaler_state({**GradScaler("cpu").state_dict(), "growth_factor": wrong})
    with pytest.raises(KeyError, match="hysteresis_tracker"):
        convert_scaler_state({"scale": 1.0}, source="megatron")
