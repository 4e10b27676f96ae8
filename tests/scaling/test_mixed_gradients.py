"""Gradients that a backward pass adds to after they were unscaled: no sum of both may reach a weight."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from amp_core import GradScaler
from amp_core.scaling import mixed

X = torch.linspace(-1, 1, 32).reshape(4, 8)
Call = Callable[[GradScaler, torch.optim.Optimizer], Any]

BEFORE: dict[str, Call] = {
    "unscaled": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "clipped": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1e9),
    "clipped as one": lambda scaler, optimizer: scaler.clip_grad_norm_([optimizer], 1e9),
}
AFTER: dict[str, Call] = {
    "clipped": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1e9),
    "stepped": lambda scaler, optimizer: scaler.step(optimizer, max_norm=1e9),
}


class Training:
    """A model that is trained by micro-batches."""

    def __init__(self, *, fused: bool = False) -> None:
        torch.manual_seed(0)
        self.net, self.scaler = nn.Linear(8, 1), GradScaler("cpu", 1024.0)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, fused=fused)

    def backward(self) -> None:
        self.scaler.scale(self.net(X).square().mean()).backward()

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.clone() for p in self.net.parameters() if p.grad is not None]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("cleared", [False, True])
def test_they_are_refused(before: str, after: str, fused: bool, cleared: bool) -> None:
    """The weights move by a thousand times what they should, and no step is skipped."""
    run = Training(fused=fused)
    run.backward()
    BEFORE[before](run.scaler, run.optimizer)
    if cleared:
        run.optimizer.zero_grad()
    run.backward()
    gradients, weights = run.gradients(), copy.deepcopy(run.net.state_dict())
    with pytest.raises(RuntimeError, match=r"SGD.*last backward pass.*clear the gradients and call update"):
        AFTER[after](run.scaler, run.optimizer)
    assert all(map(torch.equal, run.gradients(), gradients))
    assert all(torch.equal(run.net.state_dict()[name], value) for name, value in weights.items())
    run.optimizer.zero_grad()
    run.scaler.update()
    run.backward()
    AFTER[after](run.scaler, run.optimizer)  # as the message says


@pytest.mark.parametrize("before", BEFORE)
def test_they_are_refused_behind_a_frozen_parameter(before: str) -> None:
    """With a first parameter that has no gradient, no sum is noticed."""
    run = Training()
    run.net.weight.requires_grad_(False)
    run.backward()
    BEFORE[before](run.scaler, run.optimizer)
    run.backward()
    with pytest.raises(RuntimeError, match="last backward pass"):
        run.scaler.step(run.optimizer, max_norm=1e9)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("before", BEFORE)
def test_a_step_on_gradients_that_came_later_is_refused(before: str, fused: bool) -> None:
    """A call of unscale_ that stands before backward() lets a fused step take scaled, unchecked gradients."""
    run = Training(fused=fused)
    run.scaler.scale(torch.ones(()))
    BEFORE[before](run.scaler, run.optimizer)
    run.backward()
    gradients, weights = run.gradients(), copy.deepcopy(run.net.state_dict())
    with pytest.raises(AssertionError, match=r"No inf checks.*SGD.*scaled and unchecked.*after backward"):
        run.scaler.step(run.optimizer)
    assert all(map(torch.equal, run.gradients(), gradients))
    assert all(torch.equal(weights[name], tensor) for name, tensor in run.net.state_dict().items())
    theirs, optimizer = torch.amp.GradScaler("cpu"), run.optimizer
    theirs.scale(torch.ones(()))
    optimizer.zero_grad()
    theirs.unscale_(optimizer)
    run.net(X).sum().backward()
    with pytest.raises((AssertionError, AttributeError)):
        theirs.step(optimizer)


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("before", BEFORE)
def test_what_is_no_sum_is_allowed(before: str, after: str) -> None:
    """A loss of other weights, or a change by the program itself, is taken for a sum."""
    run, other = Training(), Training()
    run.backward()
    BEFORE[before](run.scaler, run.optimizer)
    other.scaler = run.scaler
    other.backward()
    AFTER[after](run.scaler, run.optimizer)
    run, expected = Training(), Training()
    for training in (run, expected):
        training.backward()
    BEFORE[before](run.scaler, run.optimizer)
    expected.scaler.unscale_(expected.optimizer)
    for training in (run, expected):
        nn.utils.clip_grad_value_(training.net.parameters(), 0.1)
    AFTER[after](run.scaler, run.optimizer)
    assert all(map(torch.equal, run.gradients(), expected.gradients()))


@pytest.mark.parametrize("after", AFTER)
def test_cleared_gradients_are_no_sum(after: str) -> None:
    """A loss of another model is blamed for a sum where there is no gradient at all."""
    run, other = Training(), Training()
    run.backward()
    run.scaler.unscale_(run.optimizer)
    run.optimizer.zero_grad()
    other.scaler = run.scaler
    other.backward()
    AFTER[after](run.scaler, run.optimizer)
    assert not run.gradients()


def test_without_versions_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a torch that does not tell versions, no two are alike, and what is no sum is taken for one."""
    numbers = itertools.count()
    monkeypatch.setattr(mixed, "version_of", lambda _: next(numbers))
    monkeypatch.setattr(mixed, "counts_writes", lambda: False)
    test_what_is_no_sum_is_allowed("unscaled", "clipped")


def test_the_next_step_is_another() -> None:
    """What an earlier step has noted is held against the gradients of the next."""
    run = Training()
    for _ in range(3):
        run.backward()
        run.scaler.clip_grad_norm_(run.optimizer, 1e9)
        run.scaler.clip_grad_norm_(run.optimizer, 1.0)
        run.scaler.step(run.optimizer)
        run.scaler.update()
