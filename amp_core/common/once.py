"""Results that are computed once for all threads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from amp_core.common.locks import new_lock

R = TypeVar("R")


def once(function: Callable[..., R]) -> Callable[..., R]:
    """Cache results like ``functools.cache``, but run `function` in one thread while others wait."""
    cached, lock = functools.cache(function), new_lock()

    @functools.wraps(function)
    def call(*args: Any) -> R:
        with lock:
            return cached(*args)

    return call
