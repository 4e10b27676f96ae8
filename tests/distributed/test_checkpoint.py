"""Checkpoints of torch.distributed.checkpoint, saved on one number of ranks and loaded on another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from amp_core import (
    AmpWarning,
    AtFloor,
    GradScaler,
    LossScaleSchedule,
    OpPolicy,
    Recipe,
    autocast,
    delayed_scales,
)

from .data.checkpoint import Run


def check(run: Run, expected: Run) -> None:
    ours, theirs = run.everything(), expected.everything()
    for part in theirs:
        assert ours[part] == theirs[part], part
    run.steps = expected.steps


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("storage", ["remainder", "stochastic", "kahan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_every_part_of_a_run_goes_on(
    storage: str, dtype: torch.dtype, states: torch.dtype, kind: type, tmp_path: Path
) -> None:
    """A new optimizer, which has no moments yet or only its own, takes what it has from the checkpoint."""
    run, again = (Run(storage=storage, dtype=dtype, states=states, kind=kind) for _ in range(2))
    for _ in range(4):
        run.step()
    dcp.save(run.parts(), checkpoint_id=tmp_path)
    again.load(tmp_path)
    check(again, run)
    run.step()
    again.step()
    check(again, run)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_scaler_that_has_stopped_stays_so(tmp_path: Path) -> None:
    """The schedule has other entries than at the start: the checkpoint lacks some, or drops others."""
    rule = LossScaleSchedule(min_scale=2.0, at_floor=AtFloor.STOP)
    stopped, again = (GradScaler("cpu", schedule=rule, schedules={"g": rule}) for _ in range(2))
    stopped.scale(torch.ones(()), "g")
    stopped._scales.keyed["g"].stop()
    dcp.save({"scaler": stopped}, checkpoint_id=tmp_path)
    dcp.load({"scaler": again}, checkpoint_id=tmp_path)
    assert again.get_scale("g") == 1.0
    assert again.state_dict() == stopped.state_dict()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_histories_that_a_checkpoint_has_and_the_run_has_not(tmp_path: Path) -> None:
    """Nothing is loaded, in silence, and the histories start anew."""
    model = torch.nn.Linear(16, 16)
    policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=2)})
    scales, again = delayed_scales(model), delayed_scales(model)

    def call() -> None:
        with autocast("cpu", policy=policy):
            model(torch.ones(2, 16)).sum().backward()

    with scales:
        call()
        scales.step()
    dcp.save({"scales": scales}, checkpoint_id=tmp_path)
    with pytest.warns(AmpWarning, match="only loads entries that exist. Call the model in this scope"):
        dcp.load({"scales": again}, checkpoint_id=tmp_path)
    with again:
        call()
    dcp.load({"scales": again}, checkpoint_id=tmp_path)
    torch.testing.assert_close(again.state_dict(), scales.state_dict(), rtol=0, atol=0)


def test_histories_of_a_run_whose_optimizer_has_no_states() -> None:
    """To read or set its states, torch lets such an optimizer step, which adds a step without products.

    The next scales follow from fewer steps, or from none.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=2)})
    for rate in (0.1, torch.tensor(0.1)):
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with delayed_scales(model) as scales:
            for _ in range(2):
                with autocast("cpu", policy=policy):
                    model(torch.ones(2, 16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            before = scales.state_dict()
            states = get_state_dict(model, optimizer)
            torch.testing.assert_close(scales.state_dict(), before, rtol=0, atol=0)
            scales.load_state_dict(before)
            again = torch.optim.SGD(model.parameters(), lr=rate)
            set_state_dict(model, again, model_state_dict=states[0], optim_state_dict=states[1])
            torch.testing.assert_close(scales.state_dict(), before, rtol=0, atol=0)


def test_the_first_step_of_a_warm_up_counts() -> None:
    """The histories of a run whose learning rate begins at 0 miss its first step."""
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=2)})
    with delayed_scales(model) as scales:
        with autocast("cpu", policy=policy):
            model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    assert scales.state_dict()["weight"]["input"]["seen"].tolist() == [0.0, 1.0]


def test_a_checkpoint_leaves_the_random_bits_of_a_run() -> None:
    """A run that saves checkpoints rounds other weights up than one that does not."""
    weights = []
    for saves in (False, True):
        run = Run(storage="stochastic", kind=torch.optim.SGD)
        for _ in range(4):
            run.step()
            run.optimizer.zero_grad()
            if saves:
                get_state_dict(run.model, run.optimizer)
        weights.append(run.everything()["exact"])
    assert weights[0] == weights[1]


@pytest.mark.parametrize("storage", ["remainder", "kahan"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_flattened_states(kind: type, storage: str) -> None:
    """The low bits of weights are lost where torch loads only the entries that the new optimizer has."""
    run, again = (Run(dtype=torch.float32, kind=kind, storage=storage) for _ in range(2))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    run.step()
    model, optimizer = copy.deepcopy(get_state_dict(run.model, run.optimizer, options=options))
    set_state_dict(
        again.model, again.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options
    )
    for part in ("exact", "optim"):
        assert again.everything()[part] == run.everything()[part]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_run_that_has_not_begun(kind: type, tmp_path: Path) -> None:
    """The low bits of float32 weights are lost before the first step, or Adam misses its step count."""
    run, again = (Run(dtype=torch.float32, kind=kind) for _ in range(2))
    exact = run.everything()["exact"]
    with torch.no_grad():
        again.model[0].weight.zero_()
    torch.save([run.model.state_dict(), run.optimizer.state_dict()], tmp_path / "run.pt")
    model, optimizer = torch.load(tmp_path / "run.pt")
    again.model.load_state_dict(model)
    again.optimizer.load_state_dict(optimizer)
    assert again.everything()["exact"] == exact
    run.step()
    again.step()
    check(again, run)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_of_one_process_goes_on_sharded_and_back(
    on_ranks: Callable[..., str], tmp_path: Path
) -> None:
    """Moments, low bits of weights, scales of keys or histories start anew, or belong to one rank's shard.

    Or the ranks cannot exchange them for full states.
    """
    run = Run()
    for _ in range(4):
        run.step()
    dcp.save(run.parts(), checkpoint_id=tmp_path / "one")
    script = Path(__file__).parent / "data" / "checkpoint.py"
    on_ranks(script, str(tmp_path / "one"), str(tmp_path / "two"))
    run.step()
    again = Run()
    again.load(tmp_path / "two")
    check(again, run)
    run.step()
    again.step()
    check(again, run)
