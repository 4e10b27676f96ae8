"""A lock around torch's cache of casts, for the calls of its kernels that come from Python.

torch locks the cache while it casts, and a `TorchDispatchMode` makes the cast run Python code. Ops that are
called as usual wait for the cache without the interpreter's lock. A kernel that Python calls by itself keeps
it, so two threads would wait for each other. So would a thread that clears the cache, as torch's own regions
do when they end, if it has to free a cast that Python has seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from amp_core._torch.dynamo import never_compile
from amp_core.common.locks import new_lock
from amp_core.common.once import once

_lock = new_lock()


def one_at_a_time(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return `kernel`, which may cast through torch's cache, for one thread at a time."""
    _replace_clear()

    def call(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            return kernel(*args, **kwargs)

    return call


@once
def when_cleared(callback: Callable[[], None]) -> None:
    """From the first request on, call `callback` in each thread that clears torch's cache, as regions do."""
    _when_cleared.append(callback)
    _replace_clear()


@once
def when_regions_end(callback: Callable[[], None]) -> None:
    """From the first request on, call `callback` in each thread whose outermost region has ended."""
    _when_regions_end.append(callback)
    _replace_clear()


_when_cleared: list[Callable[[], None]] = []
_when_regions_end: list[Callable[[], None]] = []


def _replace_clear() -> None:
    global clear, clear_within_region  # a lock takes a tenth of a region's time
    if clear is not _end_region:
        clear, clear_within_region = _end_region, _clear_alone
        never_compile(_end_region)
        never_compile(_clear_alone)
        setattr(torch, _CLEAR, _end_region)  # torch's regions end with it, too
        time.sleep(0.001)  # lets calls without the lock that have begun end


def _end_region() -> None:
    _clear_alone()
    for callback in () if torch.compiler.is_dynamo_compiling() else _when_regions_end:
        callback()


def _clear_alone() -> None:
    if torch.compiler.is_dynamo_compiling():  # a graph has torch's function
        _torchs_clear()
        return
    with _lock:
        _torchs_clear()
    for callback in _when_cleared:
        callback()


_CLEAR = "clear_autocast_cache"
_torchs_clear: Callable[[], None] = getattr(torch, _CLEAR)
clear = _torchs_clear
"""Clears torch's cache. Each region ends with it, so it does nothing else until that is needed."""
clear_within_region = _torchs_clear
"""Clears it where no outermost region ends: after a step, or where the dtype changes."""
