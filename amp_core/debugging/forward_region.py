"""The region that a tool enters around a whole training step, for its forward pass."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from amp_core.common.optimizers import StepArguments, after_every_step, around_closure, before_every_step
from amp_core.common.replaced import Replaced
from amp_core.regions.region import autocast
from amp_core.states.region_stack import thread


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entered: list[autocast] = []
        self.steps: list[tuple[Optimizer, autocast | None]] = []
        """For each step that runs, the region in which autocast is off for it; None if it is off anyway."""

    def outside(self) -> autocast | None:
        """Return a region that turns autocast off, if the innermost region is one of a tool."""
        if not self.entered or torch.compiler.is_dynamo_compiling() or not _is_innermost(self.entered[-1]):
            return None
        return autocast(self.entered[-1].device, self.entered[-1].fast_dtype, enabled=False)


_here = _Thread()


@contextmanager
def forward_region(region: autocast) -> Iterator[None]:
    """Enter `region` for a block; backward passes and steps of optimizers leave it, as those of programs do.

    A region that the block itself enters around them stays. In `region` runs what a forward pass may
    contain: ``torch.autograd.grad``; and the closure of an optimizer, which contains one.
    """
    if torch.is_autocast_enabled(region.device):  # and so it would be after `region`
        with region:
            yield
        return
    before_every_step(_before_step)
    after_every_step(_end_steps)
    steps, _here.steps = _here.steps, []
    _here.entered.append(region)
    try:
        with region, _passes_replaced.block():
            try:
                yield
            finally:
                _end_steps(None)  # that have raised
    finally:
        _here.entered.pop()
        _here.steps = steps


# Steps of optimizers.


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
    if not _here.entered:
        return None
    outside = _here.outside()
    if outside is None:  # in a region of the program, or within another step
        _here.steps.append((optimizer, None))
        return None

    outside.__enter__()
    _here.steps.append((optimizer, outside))
    come_back = functools.partial(outside.__exit__, None, None, None)
    return around_closure(args, kwargs, before=come_back, after=outside.__enter__)


def _end_steps(optimizer: Optimizer | None) -> None:
    """End the last step of `optimizer`, or all for None, and those within it, which have raised."""
    while _here.steps:
        stepped, outside = _here.steps.pop()
        if outside is not None and _is_innermost(outside):  # not after an error of a closure
            outside.__exit__(None, None, None)
        if stepped is optimizer:
            return


def _is_innermost(region: autocast) -> bool:
    frame = thread.regions[-1] if thread.regions else None
    return frame is not None and frame.region is region and frame.nesting == _nesting()


def _nesting() -> int:
    """Return how many regions this thread is in, those of torch among them."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


# Backward passes: ``Tensor.backward`` calls this function too.


def _outside(backward: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        with _here.outside() or nullcontext():
            backward(*args, **kwargs)

    return call


_passes_replaced = Replaced(lambda: [(torch.autograd, "backward")], _outside)
