"""Validate third-party backends: what their methods return when called, and the attributes they register."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from amp_core.common.arguments import is_count
from amp_core.common.environment import DISABLE_BACKENDS, SettingError
from amp_core.errors import BackendError
from amp_core.kernels import Kernels, ScaledProducts
from amp_core.policy.op_policy import OpPolicy
from amp_core.policy.rules import RULES


@dataclass(frozen=True)
class Availability:
    """Whether a device can be used now, with a human-readable reason.

    Attributes:
        usable: whether it can.
        reason: why not; or what was found, such as the name of the device. Shown by ``amp backends``.
    """

    usable: bool
    reason: str

    def __bool__(self) -> bool:
        return self.usable


@dataclass(frozen=True)
class Refusal:
    """How `autocast` or `GradScaler` reports a device or dtype that cannot be used.

    Attributes:
        message: the text of the warning or error.
        error: raise ``RuntimeError(message)``; otherwise warn and run the region disabled.
    """

    message: str
    error: bool = False


def _is_availability(value: object) -> bool:
    return (
        isinstance(value, Availability) and isinstance(value.usable, bool) and isinstance(value.reason, str)
    )


def _are_kernels(value: object) -> bool:
    named = isinstance(getattr(value, "name", None), str)
    return isinstance(value, Kernels) and named and isinstance(value.reason, str)


def _is_dtype(value: object) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point


def _are_dtypes(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(map(_is_dtype, value))


def _is_recipe(value: object) -> bool:
    from amp_core.formats import Recipe

    return isinstance(value, Recipe)


def _may_refuse(value: object) -> bool:
    return value is None or isinstance(value, Refusal)


RESULTS: dict[str, tuple[Callable[[object], bool], str]] = {
    "availability": (_is_availability, "an amp_core.plugin.Availability of a bool and a string"),
    "default_dtype": (lambda v: isinstance(v, torch.dtype), "a torch.dtype"),  # users may set any
    "supported_dtypes": (_are_dtypes, "a tuple of one or more floating-point torch.dtypes"),
    "dtype_reason": (lambda v: isinstance(v, str), "a string"),
    "autocast_refusal": (_may_refuse, "None or an amp_core.plugin.Refusal"),
    "scaler_refusal": (_may_refuse, "None or an amp_core.plugin.Refusal"),
    "op_policy": (lambda v: isinstance(v, OpPolicy), "an amp_core.OpPolicy"),
    "recommended_recipe": (_is_recipe, "an amp_core.Recipe"),
    "kernels": (_are_kernels, "an amp_core.kernels.Kernels whose name and reason are strings"),
    "scaled_products": (lambda v: isinstance(v, ScaledProducts), "an amp_core.kernels.ScaledProducts"),
}
"""Maps each `Backend` method to a check of its result and a description of a valid one."""


COMPUTED = (property, functools.cached_property)
"""Descriptors that are allowed for attributes but not for methods."""

_WITH_ARGUMENTS = ("dtype_reason", "autocast_refusal")


def checked(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the backend method `name` so that errors name the plugin and the method."""
    if name not in _WITH_ARGUMENTS:
        return functools.wraps(method)(_checked(name, method))

    @functools.wraps(method)
    def call(self: Any, *args: object, **kwargs: object) -> Any:
        return _checked(name, lambda backend: method(backend, *args, **kwargs))(self)

    return call


class CheckedDescriptor:
    """Checks the results of a method that is not a plain function, such as a cached one."""

    def __init__(self, name: str, method: Any) -> None:
        self._name, self._method = name, method

    def __get__(self, backend: Any, owner: type) -> Any:
        bound = self._method.__get__(backend, owner)
        if backend is None:
            return bound

        def call(*args: object, **kwargs: object) -> Any:
            return _checked(self._name, lambda _: bound(*args, **kwargs))(backend)

        return call


def described(error: BaseException) -> str:
    """Return the type and text of `error`, which may have none, or one of many lines."""
    try:
        text = str(error)
    except Exception as failure:
        text = f"(its text cannot be had: {type(failure).__name__})"
    return f"{type(error).__name__}: {_shortened(text)}"


def _written(value: object) -> str:
    try:
        return _shortened(repr(value))
    except Exception as failure:  # torch cannot print a tensor of a device that lacks an op or a dtype
        return f"a {type(value).__name__} (its repr raises {type(failure).__name__})"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


_LONGEST = 1000


def _checked(name: str, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    accepts, expected = RESULTS[name]
    last: object = object()  # most methods return one object again and again: every step asks for kernels

    def call(self: Any) -> Any:  # without *args, which are slow: each region that is built asks for its dtype
        nonlocal last
        try:
            result = method(self)
        except (BackendError, SettingError):  # a setting is its user's
            raise
        except (Exception, SystemExit) as error:  # one that exits must not end the program
            text = described(error)
            end = "" if text.endswith((".", "?")) else "."
            raise BackendError(_text(self, name, f"raised {text}{end}")) from error
        if result is last:
            return result
        if not accepts(result):
            raise BackendError(_text(self, name, f"returned {_written(result)}, but must return {expected}."))
        if name == "op_policy" and result.device_type != self.device_type:
            fix = f"return OpPolicy({self.device_type!r}, OpPolicy.default({result.device_type!r}).rules)."
            raise BackendError(_text(self, name, f"returned the policy of {result.device_type!r}; {fix}"))
        if name != "op_policy":  # right for one device type, it is wrong for another that the class serves
            last = result
        return result

    return call


def wrong_kernel(kernels: Kernels, name: str, device: str, result: object, expected: str) -> BackendError:
    """Return the error of a kernel that returned something else than `expected`."""
    what = f"{type(kernels).__name__}.{name}(), a kernel of {device!r}, returned {_written(result)}"
    return BackendError(f"{what}, but must return {expected}.\n{_BUG}{device}.")


def _text(backend: Any, method: str, fault: str) -> str:
    owner = backend.origin or type(backend).__module__
    return f"{type(backend).__name__}.{method}() of {owner} {fault}\n{_BUG}{backend.device_type}."


_BUG = f"This is a bug in that plugin: report it to its authors, or disable it with {DISABLE_BACKENDS}="


# Attributes.


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
        if name in vars(backend):  # its results would not be checked
            return f"{name} must be a method of the class, not an attribute of the instance"
        value = inspect.getattr_static(backend, name)
        if isinstance(value, COMPUTED) or not callable(getattr(type(backend), name)):
            return f"{name} must be a method that returns {expected}; it is {_kind_of(value)}"
    for name, (accepts, expected) in ATTRIBUTES.items():
        value = getattr(backend, name) if read else inspect.getattr_static(backend, name)
        if not isinstance(value, COMPUTED) and not accepts(value):
            return f"{name} must be {expected}; it is {_kind_of(value)}"
    if type(backend).__hash__ is None:
        return "a class with __eq__ must also define __hash__: backends are kept in dictionaries"
    return ""


def _kind_of(value: object) -> str:
    if isinstance(value, COMPUTED):
        return "a property"
    return "a method" if inspect.isroutine(value) else _written(value)
