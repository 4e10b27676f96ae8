"""Find the tensors in nested containers, or apply a function to each."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, in nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def map_tensors(
    value: Any, fn: Callable[[Tensor], Tensor], other: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Return `value` with `fn` applied eagerly to each tensor in it.

    Descends into lists, tuples, namedtuples, sets, mapping values, dataclass instances and iterators (an
    iterator is consumed and returned as an iterator over a list). Strings, arrays and everything else go
    through `other`, which returns them unchanged by default. Subclasses of the built-in containers keep
    their class.
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        return _mapping(value, {k: map_tensors(v, fn, other) for k, v in value.items()})
    if isinstance(value, (list, tuple, set, frozenset)):
        return _sequence(value, [map_tensors(v, fn, other) for v in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, fn, other)
    if isinstance(value, Iterator):
        return iter([map_tensors(v, fn, other) for v in value])
    return other(value)


def _sequence(value: Any, items: list[Any]) -> Any:
    is_namedtuple = isinstance(value, tuple) and hasattr(value, "_fields")
    return type(value)(*items) if is_namedtuple else type(value)(items)


def _mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    if hasattr(value, "update"):  # OrderedDict, defaultdict, UserDict, BatchEncoding ...
        result = copy.copy(value)
        result.update(items)
        return result
    return type(value)(items)  # type: ignore[call-arg]  # a read-only mapping is made from another


def _dataclass(value: Any, fn: Callable[[Tensor], Tensor], other: Callable[[Any], Any]) -> Any:
    result = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            # Works for frozen dataclasses too. __init__ may not accept every field.
            object.__setattr__(result, field.name, map_tensors(getattr(value, field.name), fn, other))
    return result
