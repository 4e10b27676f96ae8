"""A model whose scope has ended is freed with its last reference, not by the garbage collector."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import amp_core
from amp_core import StoredWeights, autocast, cached_casts, master_weights


def scheduled(masters: StoredWeights) -> StoredWeights:
    torch.optim.lr_scheduler.StepLR(masters.optimizer, 1)  # wraps the step
    return masters


SCOPES: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "cached_casts": lambda model, _: cached_casts(model),
    "fp32": lambda model, _: master_weights(model),
    "remainder": lambda model, optimizer: master_weights(model, optimizer, "remainder"),
    "kahan": lambda model, optimizer: master_weights(model, optimizer, "kahan", lost_updates=True),
    "stochastic": lambda model, optimizer: master_weights(model, optimizer, "stochastic"),
    "scheduled": lambda model, optimizer: scheduled(master_weights(model, optimizer, "remainder")),
    "count_lost_updates": amp_core.count_lost_updates,
}


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def trained(scope: Callable[[nn.Module, Optimizer], Any]) -> list[weakref.ref[Any]]:
    model = nn.Linear(512, 512)
    optimizer = torch.optim.Adam(model.parameters())
    with scope(model, optimizer):
        for _ in range(2):
            with autocast("cpu"):
                loss = model(torch.ones(4, 512)).float().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [weakref.ref(each) for each in (model, model.weight, optimizer)]


@pytest.mark.parametrize("scope", SCOPES)
def test_a_model_dies_with_its_last_reference(scope: str) -> None:
    """A device keeps the weights, casts and states of each model until the collector happens to run."""
    for _ in range(2):  # what the first call imports may hold its frames
        dead = trained(SCOPES[scope])
    assert [each() for each in dead] == [None, None, None]


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_a_scheduler_keeps_is_plain_after_the_end(fused: bool) -> None:
    """A training goes on without stored weights, but its scheduler steps on what is gone, or not at all."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    with scheduled(master_weights(model, optimizer, "remainder")):
        pass
    twin = copy.deepcopy(model)
    plain = torch.optim.Adam(twin.parameters(), lr=0.1, fused=fused)
    seen: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(_))
    for _ in range(3):
        for each in (*model.parameters(), *twin.parameters()):
            each.grad = torch.ones_like(each)
        optimizer.step()
        assert optimizer.step(lambda: 1.5) == 1.5
        plain.step()
        plain.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert len(seen) == 6
