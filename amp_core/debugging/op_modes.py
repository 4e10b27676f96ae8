"""Call observers after each op of a thread, below autocast."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from amp_core._torch.dispatcher import Overload
from amp_core._torch.tensors import is_dtensor_type
from amp_core._torch.tracing import TorchDispatchMode, calls_are_captured, consists_of_others, run_in_parts
from amp_core.common.containers import tensors_in
from amp_core.debugging.collectives import kind_of
from amp_core.dispatch.engine import engine

_FUNCTIONS = (FunctionType, MethodType, partial, nn.Module)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observers: tuple[Callable[..., None], ...] = ()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_dtensor_type(kind) for kind in types):
            with _InsideDTensors(self):
                result = func(*args, **(kwargs or {}))
        elif not types and consists_of_others(func) and not _has_rule(func, (args, kwargs)):
            # Classes with a dispatch of their own (`types`) get such an op whole without a recording, too.
            return run_in_parts(self, func, args, kwargs or {})
        elif not isinstance(func, Overload) and not calls_are_captured():  # as torch.cond, with its branches
            return func(*map(self._observed, args), **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        self.tell(func, args, kwargs or {}, result)
        return result

    def _observed(self, given: Any) -> Any:
        """Return `given` so that it runs under this mode, if it is a Python function or a module."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return given(*args, **kwargs)

        return run if isinstance(given, _FUNCTIONS) else given

    def tell(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Report an op to all observers."""
        for each in self.observers:
            each(func, args, kwargs, result)


def _has_rule(op: Overload, given: Any) -> bool:
    """Whether a rule has cast the arguments of `op`, so that its parts run without autocast."""
    return any(engine(device).has_rule(op) for device in {tensor.device.type for tensor in tensors_in(given)})


class _InsideDTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports the collectives of which an op on DTensors consists; the op itself is reported as one."""

    def __init__(self, mode: _Mode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_dtensor_type(kind) for kind in types):
            return NotImplemented  # DTensor's own comes next, with this mode on
        result = func(*args, **(kwargs or {}))
        if isinstance(func, Overload) and kind_of(func) is not None:
            self._mode.tell(func, args, kwargs or {}, result)
        return result


class _Thread(threading.local):
    mode: _Mode | None = None


_THREAD = _Thread()


def observe_ops(observe: Callable[..., None]) -> Callable[[], None]:
    """Call `observe` after each op of this thread; return a function that ends it.

    All taps of a thread share one mode: torch's modes must end in the order of a stack, and taps may not.
    """
    mode = _THREAD.mode
    if mode is None:
        mode = _Mode()
        mode.__enter__()  # type: ignore[no-untyped-call]
        _THREAD.mode = mode  # last: a recording in a signal handler must not end what was not entered
    mode.observers = (*mode.observers, observe)

    def end() -> None:
        mode.observers = tuple(other for other in mode.observers if other is not observe)
        if not mode.observers:
            _THREAD.mode = None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    return end
