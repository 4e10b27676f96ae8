"""Apply rules to the ``torch.autograd.Function``s of other packages, which the dispatcher does not see.

A rule wraps ``forward``, where torch has recorded the function's inputs already: it casts what the function
computes with and saves, and autograd casts the gradients back to the dtypes of the inputs. Outside regions
whose policy has the rule, ``forward`` runs as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

from amp_core._torch.autocast import autocast_off
from amp_core.common.locks import new_lock
from amp_core.dispatch.casting import cast_to
from amp_core.dispatch.engine import policies_in_force
from amp_core.policy import rules as r

_lock = new_lock()
_wrapped: set[str] = set()


def wrap(name: str) -> None:
    """Let policies decide how the function ``package.module:Class`` runs, from its definition on."""
    with _lock:
        if name in _wrapped:
            return
        _wrapped.add(name)
        _watch_definitions()  # also of a class that is there: a module that is reloaded defines it again
        cls = _imported(name)
        if cls is not None:
            _wrap_class(cls, name)


def rule_in_force(name: str) -> tuple[str, str] | None:
    """Return the device type and the rule of the function `name` in this thread, if it has one now."""
    for device_type, active in policies_in_force():
        rule = active.policy.rules.get(name, r.UNCHANGED)
        if rule != r.UNCHANGED and torch.is_autocast_enabled(device_type):
            return device_type, rule
    return None


def _imported(name: str) -> Any:
    module, _, qualname = name.partition(":")
    try:
        return functools.reduce(getattr, qualname.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return None


@functools.cache
def _watch_definitions() -> None:
    """Have every new subclass of ``Function`` report itself, once for the process."""

    def defined(cls: Any, /, **kwargs: Any) -> None:
        super(Function, cls).__init_subclass__(**kwargs)
        name = f"{cls.__module__}:{cls.__qualname__}"
        if name in _wrapped:
            _wrap_class(cls, name)

    Function.__init_subclass__ = classmethod(defined)  # type: ignore[assignment]


def _wrap_class(cls: Any, name: str) -> None:
    cls.forward = staticmethod(_casting(cls.forward, name))


def _casting(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        ruled = rule_in_force(name)
        if ruled is None:
            return forward(*args, **kwargs)
        device_type, how = ruled
        low = torch.get_autocast_dtype(device_type)
        wide = torch.float32
        for dtype in {r.LOWER_PRECISION_FP: [low], r.FP32: [wide], r.LOW_IN_FP32_OUT: [low, wide]}[how]:
            args = tuple(cast_to(a, dtype, device_type, keep=False) for a in args)
            kwargs = {k: cast_to(v, dtype, device_type, keep=False) for k, v in kwargs.items()}
        with autocast_off(device_type):
            return forward(*args, **kwargs)

    return run
