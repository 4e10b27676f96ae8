"""Apply rules to the ``torch.autograd.Function``s of other packages, which the dispatcher does not see.

A rule wraps ``forward`` and ``setup_context``, where torch has recorded the function's inputs already: it
casts what the function computes with and saves, and autograd casts the gradients back to the dtypes of the
inputs. It wraps ``jvp`` and ``vmap``, too, which torch calls after ``forward`` and in its place. Outside
regions whose policy has the rule, all run as they are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.autograd import Function

from amp_core._torch.autocast import autocast_off
from amp_core.common.containers import map_tensors, tensors_in
from amp_core.common.locks import new_lock
from amp_core.dispatch.casting import cast_to
from amp_core.dispatch.engine import policies_in_force
from amp_core.policy import rules as r

_lock = new_lock()
_wrapped: set[str] = set()
_when_defined: list[Callable[[Any], None]] = []


def wrap(name: str) -> None:
    """Let policies decide how the function ``package.module:Class`` runs, from its definition on."""
    with _lock:
        if name in _wrapped:
            return
        _wrapped.add(name)
        when_defined(_wrap_defined)  # also a class that is there: a module that is reloaded defines it again
        found = {cls for cls in subclasses(Function) if _name_of(cls) == name}  # from any loader of modules
        for cls in found | {_imported(name)} - {None}:
            _wrap_class(cls, name)


def rule_in_force(name: str, devices: Collection[str]) -> tuple[str, str] | None:
    """Return the device type, one of `devices` if it can be, and the rule of `name` in this thread now."""
    rules = [(device, active.policy.rules.get(name, r.UNCHANGED)) for device, active in policies_in_force()]
    ruled = [each for each in rules if each[1] != r.UNCHANGED and torch.is_autocast_enabled(each[0])]
    return next((each for each in ruled if each[0] in devices), ruled[0] if ruled else None)


def _imported(name: str) -> Any:
    module, _, qualname = name.partition(":")
    try:
        return functools.reduce(getattr, qualname.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return None


def _wrap_defined(cls: Any) -> None:
    name = _name_of(cls)
    if name in _wrapped:
        _wrap_class(cls, name)


def _name_of(cls: Any) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def subclasses(cls: Any) -> Iterator[Any]:
    """Yield the subclasses of `cls`, each after those it inherits from; some more than once."""
    for sub in cls.__subclasses__():
        yield sub
        yield from subclasses(sub)


@functools.cache
def when_defined(call: Callable[[Any], None]) -> None:
    """Have `call` get every subclass of ``Function`` that is defined from the first request on."""
    _watch_definitions()
    _when_defined.append(call)


@functools.cache
def _watch_definitions() -> None:
    """Have every new subclass of ``Function`` report itself, once for the process."""

    def defined(cls: Any, /, **kwargs: Any) -> None:
        super(Function, cls).__init_subclass__(**kwargs)
        for call in _when_defined:
            call(cls)

    Function.__init_subclass__ = classmethod(defined)  # type: ignore[assignment]


def _wrap_class(cls: Any, name: str) -> None:
    for method in ("forward", "jvp", "vmap"):
        own = getattr(cls, method)
        if own is not getattr(Function, method):
            setattr(cls, method, staticmethod(_casting(own, name)))
    if cls.setup_context is not Function.setup_context:
        cls.setup_context = staticmethod(_casting_inputs(cls.setup_context, name))


def _casting(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        ruled = rule_in_force(name, _devices(args, kwargs))
        if ruled is None:
            return method(*args, **kwargs)
        args = tuple(_cast(a, *ruled) for a in args)
        kwargs = {k: _cast(v, *ruled) for k, v in kwargs.items()}
        with autocast_off(ruled[0]):
            return method(*args, **kwargs)

    return run


def _casting_inputs(setup_context: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Have it save what `forward` computed with: otherwise the backward pass would meet two dtypes."""

    @functools.wraps(setup_context)
    def run(ctx: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        ruled = rule_in_force(name, _devices(inputs, {}))
        if ruled is None:
            return setup_context(ctx, inputs, output)
        with autocast_off(ruled[0]):
            return setup_context(ctx, tuple(_cast(each, *ruled) for each in inputs), output)

    return run


def _devices(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    return tuple(tensor.device.type for tensor in tensors_in((args, kwargs)))


def _cast(value: Any, device_type: str, rule: str) -> Any:
    low, wide = torch.get_autocast_dtype(device_type), torch.float32
    for dtype in {r.LOWER_PRECISION_FP: [low], r.FP32: [wide], r.LOW_IN_FP32_OUT: [low, wide]}[rule]:
        cast = functools.partial(cast_to, dtype=dtype, device_type=device_type, keep=False)
        value = map_tensors(value, cast)
    return value
