"""Whether a subclass can be called like the class that it derives from."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any


def require_same_arguments(cls: type, base: type) -> None:
    """Raise TypeError if a method of `cls` does not take what the method of `base` that it overrides does."""
    for name, method in vars(base).items():
        override = vars(cls).get(name)
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        if not isinstance(override, (type(method), staticmethod, classmethod)):
            continue
        found, expected = _arguments(override), _arguments(method)
        if not _takes(found, expected):
            raise TypeError(
                f"{cls.__qualname__}.{name}{found} cannot be called like "
                f"{base.__qualname__}.{name}{expected}, which it overrides: take these arguments, in this "
                f"order and by these names, and give each other one a default."
            )


def _arguments(method: Callable[..., Any] | staticmethod[..., Any] | classmethod[Any, ..., Any]) -> Signature:
    """Return the arguments that a call by an instance passes, without annotations."""
    function = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
    given = list(inspect.signature(function).parameters.values())
    bound = isinstance(method, staticmethod) or (given and given[0].kind is Parameter.VAR_POSITIONAL)
    return Signature([each.replace(annotation=Parameter.empty) for each in (given if bound else given[1:])])


def _takes(found: Signature, expected: Signature) -> bool:
    every = {name: name for name in expected.parameters}
    by_name = {n: n for n, each in expected.parameters.items() if each.kind is Parameter.KEYWORD_ONLY}
    by_place = [name for name in every if name not in by_name]
    required = [n for n in by_place if expected.parameters[n].default is Parameter.empty]
    try:
        found.bind(**every)
        found.bind(*required)
        taken = found.bind(*by_place, **by_name).arguments
    except TypeError:
        return False
    return all(taken[name] == name for name in every if name in taken)
