"""Validate the attributes of a third-party backend when it is registered."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping

from amp_core.common.arguments import is_count
from amp_core.plugin.results import COMPUTED, RESULTS
from amp_core.policy.rules import RULES


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _are_names(value: object) -> bool:
    return not isinstance(value, str) and isinstance(value, Collection) and _are_texts(value)


def _are_op_lists(value: object) -> bool:
    return isinstance(value, Mapping) and value.keys() <= RULES.keys() and _are_texts(value.values())


def _are_texts(values: Collection[object]) -> bool:
    return all(isinstance(text, str) for text in values)


ATTRIBUTES: dict[str, tuple[Callable[[object], bool], str]] = {
    "op_lists": (_are_op_lists, f"a mapping to op names in one string each, from {', '.join(RULES)}"),
    "has_float64": (_is_bool, "True or False"),
    "grad_bucket_nbytes": (is_count, "a positive int"),
    "caches_memory": (_is_bool, "True or False"),
    "also_casts": (_are_names, "a frozenset of device types"),
    "aliases": (_are_names, "a tuple of strings"),
}
"""Maps each attribute of `Backend` to a check of its value and a description of a valid one."""


def wrong_attribute(backend: object, *, read: bool = False) -> str:
    """Say which attribute is wrong; empty if none is.

    Properties, which may ask the driver, are looked at only with `read`.
    """
    for name, (_, expected) in RESULTS.items():
        value = inspect.getattr_static(backend, name)
        if isinstance(value, COMPUTED) or not callable(getattr(type(backend), name)):
            return f"{name} must be a method that returns {expected}; it is {_described(value)}"
    for name, (accepts, expected) in ATTRIBUTES.items():
        value = getattr(backend, name) if read else inspect.getattr_static(backend, name)
        if not isinstance(value, COMPUTED) and not accepts(value):
            return f"{name} must be {expected}; it is {_described(value)}"
    if type(backend).__hash__ is None:
        return "a class with __eq__ must also define __hash__: backends are kept in dictionaries"
    return ""


def _described(value: object) -> str:
    if isinstance(value, COMPUTED):
        return "a property"
    return "a method" if inspect.isroutine(value) else repr(value)
