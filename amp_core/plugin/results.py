"""Validate the return values of third-party backends when their methods are called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from amp_core.errors import BackendError
from amp_core.kernels import Kernels, ScaledProducts
from amp_core.policy.op_policy import OpPolicy


@dataclass(frozen=True)
class Availability:
    """Whether a device can be used now, with a human-readable reason."""

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
    "availability": (lambda v: isinstance(v, Availability), "an amp_core.plugin.Availability"),
    "default_dtype": (_is_dtype, "a floating-point torch.dtype"),
    "supported_dtypes": (_are_dtypes, "a tuple of one or more floating-point torch.dtypes"),
    "dtype_reason": (lambda v: isinstance(v, str), "a string"),
    "autocast_refusal": (_may_refuse, "None or an amp_core.plugin.Refusal"),
    "scaler_refusal": (_may_refuse, "None or an amp_core.plugin.Refusal"),
    "op_policy": (lambda v: isinstance(v, OpPolicy), "an amp_core.OpPolicy"),
    "recommended_recipe": (_is_recipe, "an amp_core.Recipe"),
    "kernels": (lambda v: isinstance(v, Kernels), "an amp_core.kernels.Kernels"),
    "scaled_products": (
        lambda v: isinstance(v, ScaledProducts),
        "an amp_core.kernels.ScaledProducts",
    ),
}
"""Maps each `Backend` method to a check of its result and a description of a valid one."""


_WITH_ARGUMENTS = ("dtype_reason", "autocast_refusal")


def checked(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the backend method `name` so that errors name the plugin and the method."""
    if name not in _WITH_ARGUMENTS:
        return functools.wraps(method)(_checked(name, method))

    @functools.wraps(method)
    def call(self: Any, *args: object, **kwargs: object) -> Any:
        return _checked(name, lambda backend: method(backend, *args, **kwargs))(self)

    return call


def _checked(name: str, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    accepts, expected = RESULTS[name]
    last: object = object()  # most methods return one object again and again: every step asks for kernels

    def call(self: Any) -> Any:  # without *args, which are slow: each region that is built asks for its dtype
        nonlocal last
        try:
            result = method(self)
        except BackendError:
            raise
        except Exception as error:
            raise BackendError(_text(self, name, f"raised {type(error).__name__}: {error}")) from error
        if result is last:
            return result
        if not accepts(result):
            raise BackendError(_text(self, name, f"returned {result!r}, but must return {expected}."))
        last = result
        return result

    return call


def _text(backend: Any, method: str, fault: str) -> str:
    owner = backend.origin or type(backend).__module__
    return (
        f"{type(backend).__name__}.{method}() of {owner} {fault}\n"
        f"This is a bug in that plugin: report it to its authors, or disable it with "
        f"AMP_DISABLE_BACKENDS={backend.device_type}."
    )
