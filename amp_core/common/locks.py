"""Locks that threads, signal handlers and forked children can take."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks = weakref.WeakSet[Any]()


def new_lock() -> Any:
    """Return a lock that the thread which holds it may take again, and a forked child in any case."""
    lock: Any = threading.RLock()
    _locks.add(lock)
    return lock


def _renew() -> None:
    """Free the locks of threads that the fork has left behind, as those of ``threading`` itself are."""
    for lock in list(_locks):
        if not lock._is_owned():
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
