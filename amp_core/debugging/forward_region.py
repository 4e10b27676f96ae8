"""The region in which a tool runs the forward pass of a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from amp_core._torch.autocast import autocast_off
from amp_core.common.locks import new_lock
from amp_core.common.once import once
from amp_core.common.optimizers import after_every_step, before_every_step
from amp_core.regions.region import autocast


class _Thread(threading.local):
    region: tuple[str, int] | None = None
    """The device type of the innermost such region, and how many regions the thread is in."""

    def __init__(self) -> None:
        self.steps: list[AbstractContextManager[Any]] = []
        """What is to be left after each step of an optimizer that runs."""

    def outside(self) -> AbstractContextManager[Any]:
        """Return a context in which autocast is off, if the innermost region is such a one."""
        if self.region is None or self.region[1] != _nesting():
            return nullcontext()
        return autocast_off(self.region[0])


_THREAD = _Thread()


class _Replaced:
    lock, blocks = new_lock(), 0
    backward: Callable[..., None] = torch.autograd.backward


@contextmanager
def forward_region(region: autocast) -> Iterator[None]:
    """Enter `region` for a block; backward passes and steps of optimizers leave it, as in training.

    Those within another region that the block enters run in that one. So does in `region` what a forward
    pass may contain: ``torch.autograd.grad``, and a step with a closure, which contains one itself.
    """
    if torch.is_autocast_enabled(region.device):  # and so it would be after `region`
        with region:
            yield
        return
    _watch_steps()
    earlier = _THREAD.region, _THREAD.steps
    with region, _passes_replaced():
        _THREAD.region, _THREAD.steps = (region.device, _nesting()), []
        try:
            yield
        finally:
            _THREAD.region, _THREAD.steps = earlier


@contextmanager
def _passes_replaced() -> Iterator[None]:
    """Let ``Tensor.backward`` call `_backward` in a block. Blocks of several threads may end in any order."""
    with _Replaced.lock:
        if not _Replaced.blocks:
            _Replaced.backward = torch.autograd.backward
            torch.autograd.backward = _backward
        _Replaced.blocks += 1
    try:
        yield
    finally:
        with _Replaced.lock:
            _Replaced.blocks -= 1
            if not _Replaced.blocks:
                torch.autograd.backward = _Replaced.backward


def _backward(*args: Any, **kwargs: Any) -> None:
    with _THREAD.outside():
        _Replaced.backward(*args, **kwargs)


@once
def _watch_steps() -> None:
    before_every_step(_before_step)
    after_every_step(_after_step)


def _before_step(_optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _THREAD.region is not None:
        with_closure = len(args) > 1 or kwargs.get("closure") is not None
        _THREAD.steps.append(nullcontext() if with_closure else _THREAD.outside())
        _THREAD.steps[-1].__enter__()


def _after_step(_optimizer: Optimizer) -> None:
    if _THREAD.steps:
        _THREAD.steps.pop().__exit__(None, None, None)


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
