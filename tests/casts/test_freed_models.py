"""A model whose scope has ended is freed with its last reference, not by the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import amp_core
from amp_core import autocast, cached_casts, master_weights

SCOPES: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "cached_casts": lambda model, _: cached_casts(model),
    "fp32": lambda model, _: master_weights(model),
    "remainder": lambda model, optimizer: master_weights(model, optimizer, "remainder"),
    "kahan": lambda model, optimizer: master_weights(model, optimizer, "kahan", lost_updates=True),
    "stochastic": lambda model, optimizer: master_weights(model, optimizer, "stochastic"),
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
