"""The region in which a tool runs the forward pass of a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from amp_core._torch.autocast import autocast_off
from amp_core.common.locks import new_lock
from amp_core.regions.region import autocast


class _Thread(threading.local):
    region: tuple[str, int] | None = None
    """The device type of the innermost such region, and how many regions the thread is in."""


_THREAD = _Thread()


class _Replaced:
    lock, blocks = new_lock(), 0
    backward: Callable[..., None] = torch.autograd.backward


@contextmanager
def forward_region(region: autocast) -> Iterator[None]:
    """Enter `region` for a block, in which autocast is off during a backward pass, as in a training step.

    A backward pass within another region that the block enters runs in that one. So does one by
    ``torch.autograd.grad`` in `region`: a forward pass may contain it.
    """
    if torch.is_autocast_enabled(region.device):  # and so would be after `region`
        with region:
            yield
        return
    earlier = _THREAD.region
    with region, _passes_replaced():
        _THREAD.region = region.device, _nesting()
        try:
            yield
        finally:
            _THREAD.region = earlier


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
    region = _THREAD.region
    if region is None or region[1] != _nesting():
        return _Replaced.backward(*args, **kwargs)
    with autocast_off(region[0]):
        return _Replaced.backward(*args, **kwargs)


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
