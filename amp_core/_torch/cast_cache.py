"""A lock around torch's cache of casts, for the calls of its kernels that come from Python.

torch locks the cache while it casts, and a `TorchDispatchMode` makes the cast run Python code. Ops that are
called as usual wait for the cache without the interpreter's lock. A kernel that Python calls by itself keeps
it, so two threads would wait for each other.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch


class _Shared:
    lock = threading.RLock()


def _renew() -> None:
    _Shared.lock = threading.RLock()  # a thread that the fork has left behind may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def one_at_a_time(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return `kernel`, which may cast through torch's cache, for one thread at a time."""
    global clear  # noqa: PLW0603  # a lock takes a tenth of a region's time
    if clear is not _clear_alone:
        clear = _clear_alone
        time.sleep(0.001)  # lets calls without the lock that have begun end

    def call(*args: Any, **kwargs: Any) -> Any:
        with _Shared.lock:
            return kernel(*args, **kwargs)

    return call


def _clear_alone() -> None:
    with _Shared.lock:
        torch.clear_autocast_cache()


clear: Callable[[], None] = torch.clear_autocast_cache
"""Clears torch's cache. Each region ends with it, so it takes no lock until there are such kernels."""
