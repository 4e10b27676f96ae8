"""A step of an optimizer ends the step of the histories of its weights."""

from __future__ import annotations

from collections.abc import MutableMapping

from torch.optim import Optimizer

from amp_core._torch.tracing import outside_graphs
from amp_core.common.identity import WeakIdentityMapping
from amp_core.common.optimizers import after_every_step, before_every_step, inner_optimizers
from amp_core.dispatch.history_sources import sources


def follow_optimizers() -> None:
    """From now on, let optimizers end the steps of all active histories."""
    before_every_step(_before_step)
    after_every_step(_after_step)


_inside: MutableMapping[Optimizer, None] = WeakIdentityMapping()
"""Optimizers that another one steps now: its step counts. Theirs may have other weights on each rank."""


def _before_step(optimizer: Optimizer) -> None:
    if sources.active:
        _enter(optimizer)


@outside_graphs
def _enter(optimizer: Optimizer) -> None:
    for inner in inner_optimizers(optimizer):
        _inside[inner] = None


def _after_step(optimizer: Optimizer) -> None:
    if sources.active:
        _step_all(optimizer)


@outside_graphs
def _step_all(optimizer: Optimizer) -> None:
    for inner in inner_optimizers(optimizer):
        _inside.pop(inner, None)
    if optimizer not in _inside:
        for scales in sources.active:
            scales.step(optimizer)
