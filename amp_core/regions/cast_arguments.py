"""Cast the arguments of a module, without losing what the module writes to the containers among them."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor

from amp_core.common.containers import parts_of, with_parts


class CastArguments:
    """Arguments whose tensors are cast, in copies of the containers that hold them."""

    def __init__(self, cast: Callable[[Tensor], Tensor]) -> None:
        self._cast = cast
        self._casts = 0
        self._tensors: list[tuple[Tensor, Tensor]] = []  # a tensor that is given twice has one cast
        self._around: list[Any] = []  # dataclasses, which may lead back to themselves
        self._copies: list[tuple[Any, Any, dict[Any, Any], dict[Any, Any]]] = []

    def of(self, value: Any) -> Any:
        """Return `value` with its tensors cast: `value` itself if the cast changes none."""
        if isinstance(value, Tensor):
            tensor = self._cast_once(value)
            self._casts += tensor is not value
            return tensor
        given = parts_of(value)
        if given is None or any(value is each for each in self._around):
            return value
        casts_before, around = self._casts, self._around
        if dataclasses.is_dataclass(value):
            self._around = [*around, value]
        cast = {key: self.of(part) for key, part in given.items()}
        self._around = around
        if self._casts == casts_before:
            return value
        copy = with_parts(value, cast)
        if not isinstance(value, tuple):
            self._copies.append((value, copy, given, dict(cast)))
        return copy

    def _cast_once(self, tensor: Tensor) -> Tensor:
        for given, cast in self._tensors:
            if given is tensor:
                return cast
        cast = self._cast(tensor)
        if cast is not tensor:
            self._tensors.append((tensor, cast))
        return cast

    def write_back(self) -> None:
        """Write to the containers what was written to their copies."""
        for value, copy, given, cast in self._copies:
            parts = parts_of(copy) or {}
            changed = {key: part for key, part in parts.items() if key not in cast or cast[key] is not part}
            written = {key: self._given_for(part) for key, part in changed.items()}
            removed = [key for key in cast if key not in parts]
            if not written and not removed:
                continue
            if isinstance(value, (list, deque)):
                value.clear()
                value.extend([written.get(key, given.get(key)) for key in parts])
            elif isinstance(value, MutableMapping):
                for key in removed:
                    del value[key]
                for key, part in written.items():
                    value[key] = part
            else:
                for key, part in written.items():
                    object.__setattr__(value, key, part)

    def _given_for(self, part: Any) -> Any:
        """Return what `part` is a cast copy of, which the module has moved; any other part as it is."""
        pairs = ((cast[key], given[key]) for _, _, given, cast in self._copies for key in cast)
        return next((original for copy, original in pairs if copy is part), part)
