"""Find the tensors in nested containers, or apply a function to each."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, in nested lists, deques, tuples, mappings and dataclass instances."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):  # first, as ops have many
        for item in value:
            yield from tensors_in(item)
    else:
        for part in (parts_of(value) or {}).values():
            yield from tensors_in(part)


def map_tensors(
    value: Any, fn: Callable[[Tensor], Tensor], other: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Return `value` with `fn` applied eagerly to each tensor in it.

    Descends into lists, deques, tuples, namedtuples, sets, mapping values, dataclass instances and iterators
    (an iterator is consumed and returned as an iterator over a list). Strings, arrays, modules and everything
    else go through `other`, which returns them unchanged by default. Subclasses of the built-in containers
    keep their class.
    """
    if isinstance(value, Tensor):
        return fn(value)
    parts = parts_of(value)
    if parts is not None:
        return with_parts(value, {key: map_tensors(part, fn, other) for key, part in parts.items()})
    if isinstance(value, (set, frozenset)):
        return type(value)([map_tensors(v, fn, other) for v in value])
    if isinstance(value, Iterator):
        return iter([map_tensors(v, fn, other) for v in value])
    return other(value)


def parts_of(value: Any) -> dict[Any, Any] | None:
    """Return what a list, deque, tuple, mapping or dataclass instance holds, by index, key or field."""
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def with_parts(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a copy of `value`, a container of `parts_of`, that holds `parts` instead."""
    if isinstance(value, Mapping):
        return _mapping(value, parts)
    if isinstance(value, (list, tuple)):
        is_namedtuple = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*parts.values()) if is_namedtuple else type(value)(list(parts.values()))
    if isinstance(value, deque):
        return type(value)(parts.values(), value.maxlen)
    result = copy.copy(value)
    for name, part in parts.items():
        # Works for frozen dataclasses too. __init__ may not accept every field.
        object.__setattr__(result, name, part)
    return result


def _mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    if not isinstance(value, MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]  # a read-only mapping is made from another
    # Dynamo traces the method of these two, and copy.copy of UserDict, BatchEncoding ...
    has_method = type(value) in (OrderedDict, defaultdict)
    result = value.copy() if has_method else copy.copy(value)  # type: ignore[attr-defined]
    for key, item in items.items():
        result[key] = item  # not update(), which the outputs of transformers refuse
    return result
