"""What active scopes serve to the ops of every thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Sources(Generic[T]):
    """The active scopes of one kind.

    Attributes:
        active: in the order of registration; replaced as a whole, so that ops can read it without a lock.
    """

    def __init__(self) -> None:
        self.active: tuple[T, ...] = ()
        self._lock = threading.Lock()

    def register(self, source: T) -> Callable[[], None]:
        """Serve from `source` from now on; return a function that ends this."""
        with self._lock:
            self.active = (*self.active, source)

        def unregister() -> None:
            with self._lock:
                self.active = tuple(other for other in self.active if other is not source)

        return unregister
