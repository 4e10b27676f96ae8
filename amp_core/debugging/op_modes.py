"""Call observers after each op of a thread, below autocast."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from amp_core._torch.dispatcher import Overload, run_with_numbers
from amp_core._torch.tensors import is_dtensor_type
from amp_core._torch.tracing import (
    TorchDispatchMode,
    back_in_regions,
    calls_are_captured,
    consists_of_others,
    modes_above,
    outside_modes,
    regions_as_called,
    run_in_parts,
)
from amp_core.common.call_site import callers
from amp_core.common.containers import tensors_in
from amp_core.debugging.collectives import kind_of
from amp_core.debugging.op_kinds import only_moves
from amp_core.dispatch.engine import engine
from amp_core.policy.names import full_name

_FUNCTIONS = (FunctionType, MethodType, functools.partial, nn.Module)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells observers of each op of a thread.

    Attributes:
        observers: what to call.
        running: the op, without a rule, whose kernel runs now in a region, with this mode off.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observers: tuple[Callable[..., None], ...] = ()
        self.running: Overload | None = None
        self._in_kernel, self._below_rule = False, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_dtensor_type(kind) for kind in types):
            with _InsideDTensors(self):
                result = func(*args, **(kwargs or {}))
        elif not types and self._receives_whole(func, (args, kwargs)):
            # Classes with a dispatch of their own (`types`) get such an op whole without a recording, too.
            alone = self._below_rule or _is_below_another()
            in_regions = not (self._in_kernel or alone)
            with self.calling(casts=alone):
                return run_in_parts(self, func, args, kwargs or {}, in_regions=in_regions)
        elif not isinstance(func, Overload) and not calls_are_captured():  # as torch.cond, with its branches
            return func(*map(self._observed, args), **(kwargs or {}))
        else:
            result = self._run(func, types, args, kwargs or {})
        self.tell(func, args, kwargs or {}, result)
        return result

    def _receives_whole(self, func: Any, given: Any) -> bool:
        if self._in_kernel or not torch.is_inference_mode_enabled():
            return self._in_kernel and consists_of_others(func)
        return consists_of_others(func) and not _has_rule(func, given, regions_as_called())

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op. Its kernel may call ops with rules, which hold there as they do without a recording."""
        alone = types or self._below_rule or not _calls_others(func) or calls_are_captured()
        regions = [] if alone else regions_as_called()
        if not regions or _has_rule(func, (args, kwargs), regions) or _is_below_another():
            return _call(func, args, kwargs)
        earlier, self.running = self.running, func
        try:
            with back_in_regions(regions):
                return _call(func, args, kwargs)
        finally:
            self.running = earlier

    @contextmanager
    def calling(self, *, casts: bool) -> Iterator[None]:
        """Observe what an op calls, even in the kernel of another one; `casts` by a rule that it has."""
        earlier = self.running, self._in_kernel, self._below_rule
        in_kernel = self.running is not None
        self.running, self._in_kernel, self._below_rule = None, self._in_kernel or in_kernel, casts
        try:
            with self if in_kernel else nullcontext():
                yield
        finally:
            self.running, self._in_kernel, self._below_rule = earlier

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


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        if not isinstance(func, Overload):
            raise
        return run_with_numbers(func, args, kwargs)  # as `torch._foreach_pow` hands them on


def _is_below_another() -> bool:
    """Whether a mode that the program entered later calls the op: without autocast, as it would by itself."""
    handlers = (frame for frame in callers() if frame.f_code.co_name == "__torch_dispatch__")
    next(handlers)  # ours
    caller = next(handlers, None)
    return caller is not None and caller.f_globals is not globals()


@functools.cache
def _calls_others(op: Any) -> bool:
    """Whether the kernel of `op` may call other ops: any but those that torch has for views and copies."""
    return isinstance(op, Overload) and not (op.namespace == "aten" and only_moves(op))


def _has_rule(op: Overload, given: Any, regions: Iterable[str]) -> bool:
    """Whether a rule of one of these `regions` has cast the arguments, so that parts run without autocast."""
    ruled = [device_type for device_type in regions if engine(device_type).has_rule(op)]
    return bool(ruled) and any(tensor.device.type in ruled for tensor in tensors_in(given))


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


def outside_program_modes() -> AbstractContextManager[None]:
    """Keep ops in a block from the dispatch modes of the program: a tool runs them, and not the program."""
    return outside_modes(_THREAD.mode)


def runs_kernel_of(op: str) -> bool:
    """Whether the kernel of `op`, a full name, runs in this thread and has been reported."""
    running = None if _THREAD.mode is None else _THREAD.mode.running
    return running is not None and full_name(running) == op


def calling(*, casts: bool) -> AbstractContextManager[None]:
    """Observe in a block what an op with an autocast kernel calls.

    Args:
        casts: whether a rule casts its arguments, so that what it calls runs without autocast.
    """
    mode = _THREAD.mode
    return nullcontext() if mode is None else mode.calling(casts=casts)


def observe_ops(observe: Callable[..., None]) -> Callable[[], None]:
    """Call `observe` after each op of this thread; return a function that ends it.

    All taps of a thread share one mode: torch's modes must end in the order of a stack, and taps may not. It
    is below the program's modes, which may end before it or after it.
    """
    mode = _THREAD.mode
    if mode is None:
        mode = _Mode()
        with modes_above(mode):
            mode.__enter__()  # type: ignore[no-untyped-call]
        _THREAD.mode = mode  # last: a recording in a signal handler must not end what was not entered
    mode.observers = (*mode.observers, observe)

    def end() -> None:
        mode.observers = tuple(other for other in mode.observers if other is not observe)
        if not mode.observers:
            _THREAD.mode = None
            with modes_above(mode):
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    return end
