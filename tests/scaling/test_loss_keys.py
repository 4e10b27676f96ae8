"""One scale for each of several losses."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_core import GradScaler, LossScaleSchedule


class Gan:
    """Two models, each with its optimizer and its loss under a key of its own."""

    def __init__(self, fused: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.models = {key: torch.nn.Linear(2, 1) for key in "gd"}
        self.optimizers = {
            key: torch.optim.SGD(model.parameters(), lr=0.125, fused=fused)
            for key, model in self.models.items()
        }
        self.scaler = GradScaler("cpu", 8.0, **{"growth_interval": 2, **options})

    def backward(self, key: str, bad: bool = False) -> None:
        self.optimizers[key].zero_grad()
        self.scaler.scale(self.models[key](torch.ones(2)).sum(), key=key).backward()
        if bad:
            self.models[key].weight.grad.fill_(math.inf)

    def step(self, bad: str = "") -> None:
        for key, optimizer in self.optimizers.items():
            self.backward(key, key in bad)
            self.scaler.step(optimizer, key=key)
        self.scaler.update()

    def scales(self) -> tuple[float, float]:
        return self.scaler.get_scale("g"), self.scaler.get_scale("d")


@pytest.mark.parametrize("fused", [False, True])
def test_each_key_has_a_scale_of_its_own(fused: bool) -> None:
    """The overflow of one loss lowers the scale of another, or one scale divides another's gradients."""
    gan = Gan(fused, schedules={"d": LossScaleSchedule(growth_interval=1, max_scale=16.0)})
    gan.step("g")
    assert gan.scales() == (4.0, 16.0)
    before = gan.models["g"].weight.detach().clone()
    gan.step()
    assert torch.equal(gan.models["g"].weight, before - 0.125)
    gan.step()
    assert gan.scales() == (8.0, 16.0)
    assert gan.scaler.get_scale() == 8.0
    assert [(r.key, r.number, r.skipped, r.scale_before) for r in gan.scaler.history] == [
        ("g", 0, True, 8.0), ("d", 0, False, 8.0), ("g", 1, False, 4.0), ("d", 1, False, 16.0),
        ("g", 2, False, 4.0), ("d", 2, False, 16.0),
    ]  # fmt: skip


def test_the_key_is_named_once_between_updates() -> None:
    """step() after unscale_(key=...) takes another scale than unscale_ did, or unscales twice."""
    gan = Gan()
    gan.backward("g")
    gan.scaler.unscale_(gan.optimizers["g"], key="g")
    assert gan.models["g"].weight.grad.tolist() == [[1.0, 1.0]]
    norm = gan.scaler.clip_grad_norm_(gan.optimizers["g"], 100.0)
    assert norm.item() == pytest.approx(math.sqrt(3))
    gan.scaler.step(gan.optimizers["g"])
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        gan.scaler.step(gan.optimizers["g"])
    gan.scaler.update()
    gan.step()


def test_keys_beside_the_default_scale() -> None:
    """A loss without a key, as in old code, no longer has the scaler's own scale."""
    gan = Gan()
    gan.optimizers["g"].zero_grad()
    gan.scaler.scale(gan.models["g"](torch.ones(2)).sum()).backward()
    gan.scaler.step(gan.optimizers["g"])
    gan.backward("d", bad=True)
    gan.scaler.step(gan.optimizers["d"], key="d")
    gan.scaler.update()
    assert (gan.scaler.get_scale(), gan.scaler.get_scale("d")) == (8.0, 4.0)
    assert [r.skipped for r in gan.scaler.history] == [False, True]
    for key in ("d", "g"):
        gan.backward(key)
        gan.scaler.step(gan.optimizers[key], key=key)
        gan.scaler.update(key=key)
    assert [r.number for r in gan.scaler.history] == [0, 0, 1, 2]


def test_two_keys_on_the_gradients_of_one_optimizer() -> None:
    """Gradients with two scales are divided by one of them, in silence."""
    gan = Gan()
    gan.backward("g")
    gan.backward("d")
    gan.scaler.unscale_(gan.optimizers["g"], key="g")
    with pytest.raises(RuntimeError, match=r"step\(\) .* key 'd' for this SGD.* scale of the key 'g' since"):
        gan.scaler.step(gan.optimizers["g"], key="d")
    gan.scaler.step(gan.optimizers["g"])
    gan.scaler.update()


def test_keys_that_are_wrong() -> None:
    """A misspelt or forgotten key makes a new scale, or takes the wrong one."""
    gan = Gan()
    gan.backward("g")
    with pytest.raises(ValueError, match=r"No loss was scaled under the key 'G'; keys so far: 'g'\."):
        gan.scaler.step(gan.optimizers["g"], key="G")
    with pytest.raises(ValueError, match=r"step\(\) needs a key: .* 'g' and none without.* SGD"):
        gan.scaler.step(gan.optimizers["g"])
    with pytest.raises(TypeError, match="must be a string, got 3"):
        gan.scaler.scale(torch.ones(1), key=3)
    gan.scaler.scale(torch.ones(1))
    with pytest.raises(AssertionError, match=r"No inf checks were recorded prior to update\."):
        gan.scaler.update()
    gan.scaler.step(gan.optimizers["g"], key="g")
    gan.scaler.update(32.0, key="g")
    assert gan.scaler.get_scale("g") == 32.0


def test_state_goes_through_torch_and_back() -> None:
    """Torch cannot load a state with keys, or keys are lost, or shared by a copy, at resume."""
    gan = Gan()
    gan.step("g")
    state = gan.scaler.state_dict()
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(state)
    assert theirs.get_scale() == 8.0
    resumed = GradScaler("cpu")
    resumed.load_state_dict(state)
    for other in (resumed, copy.deepcopy(gan.scaler), pickle.loads(pickle.dumps(gan.scaler))):
        assert other.state_dict() == state
        follower = Gan()
        follower.scaler = other
        for bad in ("", "g", ""):
            follower.step(bad)
        assert follower.scales() == (2.0, 32.0)
    assert gan.scaler.state_dict() == state


def test_a_wrong_state_of_a_key_changes_nothing() -> None:
    """A state that cannot be loaded is half loaded."""
    gan = Gan()
    gan.step()
    state = copy.deepcopy(gan.scaler.state_dict())
    state["scale"] = 2.0
    state["_keys"]["d"]["scale"] = math.nan
    with pytest.raises(ValueError, match="positive and finite"):
        gan.scaler.load_state_dict(state)
    assert gan.scaler.get_scale() == 8.0


def test_a_state_of_keys_leaves_their_own_schedules_what_it_does_not_say() -> None:
    """A key named in `schedules=` loses its ceiling at a resume, or a key that is not gets it."""
    saved = GradScaler("cpu", 8.0)
    for key in "ab":
        saved.scale(torch.ones(()), key=key)
    state = saved.state_dict()
    assert "_schedule" not in state["_keys"]["a"]  # as all fields that torch lacks have their defaults
    own, of_a = LossScaleSchedule(max_scale=32.0), LossScaleSchedule(max_scale=64.0)
    resumed = GradScaler("cpu", 8.0, schedule=own, schedules={"a": of_a})
    resumed.load_state_dict(state)
    assert [resumed._scales.of(key).schedule.max_scale for key in (None, "a", "b")] == [32.0, 64.0, 32.0]


def test_hooks_hear_of_all_keys() -> None:
    """Hooks miss the steps of a key, or do not learn whose they are."""
    gan, seen = Gan(), []
    gan.scaler.register_scale_change_hook(lambda s, c: seen.append((s is gan.scaler, c.key, c.after)))
    gan.step("d")
    gan.step("gd")
    assert seen == [(True, "d", 4.0), (True, "g", 4.0), (True, "d", 2.0)]


def test_an_error_at_the_floor_of_one_key_leaves_the_others_right() -> None:
    """The keys after one whose update raises are never updated."""
    gan = Gan(schedules={"g": LossScaleSchedule(min_scale=8.0, at_floor="raise")})
    with pytest.raises(RuntimeError, match="at its floor"):
        gan.step("gd")
    assert gan.scales() == (8.0, 4.0)
    gan.step()


def test_keys_of_a_disabled_scaler() -> None:
    """Code with keys fails when scaling is switched off."""
    gan = Gan()
    gan.scaler = GradScaler("cpu", enabled=False)
    gan.step()
    assert gan.scales() == (1.0, 1.0)


@pytest.mark.parametrize("entry", ["patience", "growth_factor"])
def test_a_state_of_a_later_version_is_refused(entry: str) -> None:
    """A rule that this version does not know is dropped in silence, or ends in an error about Python."""
    scaler = GradScaler("cpu", schedule=LossScaleSchedule(min_scale=2.0))
    state = scaler.state_dict()
    state["_schedule"][entry] = 3
    with pytest.raises(ValueError, match=f"has {entry}, which this version of amp-core does not know"):
        GradScaler("cpu").load_state_dict(state)


def test_the_picture_has_a_curve_for_each_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales of several keys are drawn as one jagged curve."""
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    gan = Gan()
    for bad in ("g", "", "d", ""):
        gan.step(bad)
    gan.scaler.history.plot(tmp_path / "scale.svg")
    (axes,) = drawn[0].axes
    curves = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert curves == {"loss scale g": [8.0, 4.0, 4.0, 8.0], "loss scale d": [8.0, 8.0, 16.0, 8.0]}
    assert [marks.get_offsets().tolist() for marks in axes.collections] == [[[0.0, 8.0]], [[2.0, 16.0]]]
