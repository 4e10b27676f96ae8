"""What a tool has looked at is freed with its last reference, not by the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_core
from amp_core import autocast

LOW = torch.bfloat16


def loss_of(model: nn.Module) -> Callable[[], Tensor]:
    return lambda: model(torch.ones(4, 8)).float().sum()


def watched(model: nn.Module) -> None:
    with amp_core.watch(model, every=1):
        loss_of(model)().backward()


def guarded(model: nn.Module) -> None:
    with amp_core.guard(model, steps=[1]):
        for _ in range(3):
            loss_of(model)().backward()


def recorded(model: nn.Module) -> Any:
    with amp_core.record() as recording, autocast("cpu", LOW):
        loss_of(model)().backward()
    return recording


def compared(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: amp_core.compare(loss_of(model), "cpu", dtype=LOW, **options)


def advised(goal: str) -> Callable[[nn.Module], Any]:
    return lambda model: amp_core.advise(loss_of(model), "cpu", dtype=LOW, rounds=1, goal=goal)


TOOLS: dict[str, Callable[[nn.Module], Any]] = {
    "watch": watched,
    "guard": guarded,
    "record": recorded,
    "compare": compared(),
    "compare a format": compared(format="mxfp8"),
    "advise": advised("accuracy"),
    "advise on speed": advised("speed"),
}


@pytest.mark.filterwarnings("ignore::amp_core.EmulationWarning")
@pytest.mark.parametrize("tool", TOOLS)
def test_a_model_dies_with_its_last_reference(tool: str) -> None:
    """A large model stays in memory beside the next one, until the garbage collector happens to run."""
    for _ in range(2):  # what the first call imports may hold its frames
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        dead = weakref.ref(model)
        gc.collect()
        gc.disable()
        try:
            kept = TOOLS[tool](model)
            del model
            alive = dead() is not None
        finally:
            gc.enable()
    assert not alive, kept


@pytest.mark.parametrize("tool", [amp_core.watch, amp_core.guard])
def test_a_tool_that_stays_on_a_model_is_freed_with_it(tool: Any) -> None:
    """A program that makes models in a loop, and guards each, keeps all of them and runs out of memory."""
    model = nn.Linear(8, 3)
    dead = weakref.ref(model), weakref.ref(tool(model))
    assert dead[1]() is not None
    loss_of(model)().backward()
    del model
    gc.collect()
    assert [each() for each in dead] == [None, None]
    other = nn.Linear(8, 3)
    optimizer, scaler = torch.optim.SGD(other.parameters(), lr=0.1), amp_core.GradScaler("cpu")
    before = scaler._log.hooks.exist()
    scaler.scale(loss_of(other)()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not before
