"""A weak mapping from objects that need neither a hash nor equality."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


def weak(key: K, gone: Callable[[Any], object] | None = None) -> Callable[[], K | None]:
    """Return a weak reference to `key`; a strong one if its class has ``__slots__`` and takes none."""
    try:
        return weakref.ref(key, gone)
    except TypeError:
        return lambda: key


class WeakIdentityMapping(MutableMapping[K, V]):
    """A ``WeakKeyDictionary`` by identity; many times faster than torch's ``WeakIdKeyDictionary``.

    Args:
        missing: returns what the `KeyError` of a key that is not there says; by default the key.
    """

    def __init__(self, missing: Callable[[K], object] = lambda key: key) -> None:
        self._entries: dict[int, tuple[Callable[[], K | None], V]] = {}
        self._missing = missing

    def __getitem__(self, key: K) -> V:
        entry = self._entries.get(id(key))
        if entry is None:
            raise KeyError(self._missing(key))
        return entry[1]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._entries

    def get(self, key: K, default: Any = None) -> Any:
        """Return the value of `key`, or `default`."""
        entry = self._entries.get(id(key))
        return default if entry is None else entry[1]

    def key_of(self, number: int) -> K | None:
        """Return the key with the ``id`` `number`; None if there is none."""
        entry = self._entries.get(number)
        return None if entry is None else entry[0]()

    def __setitem__(self, key: K, value: V) -> None:
        entries, number = self._entries, id(key)
        known = entries.get(number)
        ref = weak(key, lambda _: entries.pop(number, None)) if known is None else known[0]
        entries[number] = ref, value

    def __delitem__(self, key: K) -> None:
        del self._entries[id(key)]

    def __iter__(self) -> Iterator[K]:
        return iter([key for ref, _ in list(self._entries.values()) if (key := ref()) is not None])

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        entries = [f"{type(key).__name__}: {value!r}" for key, value in self.items()]
        return f"{{{', '.join(entries)}}}"
