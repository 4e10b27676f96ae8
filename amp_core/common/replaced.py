"""Functions of torch that are replaced while a block runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from amp_core.common.locks import new_lock


class Replaced:
    """Attributes that are replaced in blocks of any thread; the blocks may end in any order.

    Args:
        find: called when the first block begins; yields each owner with the name of a function it defines.
        replace: called with the function, returns what takes its place.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[tuple[Any, str]]],
        replace: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._find, self._replace = find, replace
        self._lock, self._blocks = new_lock(), 0
        self._originals: list[tuple[Any, str, Callable[..., Any]]] = []

    @contextmanager
    def block(self) -> Iterator[None]:
        """Replace the functions in a block."""
        with self._lock:
            if not self._blocks:
                self._originals = [(owner, name, vars(owner)[name]) for owner, name in self._find()]
                for owner, name, original in self._originals:
                    setattr(owner, name, functools.wraps(original)(self._replace(original)))
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks:
                    for owner, name, original in self._originals:
                        setattr(owner, name, original)
