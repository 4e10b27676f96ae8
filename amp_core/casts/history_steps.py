"""A step of an optimizer ends the step of the histories of its weights."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

from torch.optim import Optimizer

from amp_core._torch.tracing import outside_graphs
from amp_core.common.identity import WeakIdentityMapping
from amp_core.common.once import once
from amp_core.common.optimizers import inner_optimizers, watch_steps
from amp_core.dispatch.sources import history_sources


@once
def follow_optimizers() -> None:
    """From now on, let optimizers end the steps of all active histories."""
    watch_steps(_begin, after=False)
    watch_steps(_end, after=True)


_inside: MutableMapping[Optimizer, None] = WeakIdentityMapping()
"""Optimizers that another one steps now: its step counts. Theirs may have other weights on each rank."""


def _while_active(callback: Callable[[Optimizer], None]) -> Callable[[Optimizer], None]:
    """Leave graphs alone while there are no histories."""
    run = outside_graphs(callback)

    def call(optimizer: Optimizer) -> None:
        if history_sources.active:
            run(optimizer)

    return call


@_while_active
def _begin(optimizer: Optimizer) -> None:
    for inner in inner_optimizers(optimizer):
        _inside[inner] = None


@_while_active
def _end(optimizer: Optimizer) -> None:
    for inner in inner_optimizers(optimizer):
        _inside.pop(inner, None)
    if optimizer not in _inside:
        for scales in history_sources.active:
            scales.step(optimizer)
