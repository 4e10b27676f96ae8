"""Install Python kernels on a device's Autocast key, for everything that changes ops there.

Three things do: a policy that differs from torch's rules (per thread), a scope that caches casts of weights
(per process), and an observer (per thread). All threads share one dispatcher, so each op gets at most one
kernel of ours, which checks what applies in its own thread; if nothing does, it runs torch's kernel.

A kernel that a policy needed stays for good: installing it costs far more than all the rest of a region, and
removing it would crash a thread that is about to call it. The kernels of scopes and observers are removed if
no other thread exists.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

from amp_core._torch.dispatcher import Overload, autocast_key, dispatcher_name, redispatch_below
from amp_core._torch.dynamo import never_compile
from amp_core._torch.op_kernels import (
    has_dispatch_key,
    has_kernel,
    install,
    install_fallthrough,
    is_python_kernel,
    native_kernel,
)
from amp_core.common.locks import new_lock
from amp_core.dispatch import weight_casts
from amp_core.dispatch.casting import Runner, make_runner, once_defined
from amp_core.policy import OpPolicy, names
from amp_core.policy import rules as r
from amp_core.policy.native_rules import added_rules, native_rules

Table = Mapping[str, "Runner | None"]
"""Maps full op names to runners; None means torch's own kernel."""

Observer = Callable[[str, Callable[[], Any], tuple[Any, ...], dict[str, Any]], Any]
"""(full op name, function that runs the op, arguments, keyword arguments) -> the op's result. An observer
must call the function."""


class Prepared(Protocol):
    """A policy, and the runners of the ops that it treats differently from torch."""

    policy: OpPolicy
    table: Table


class ThreadState(threading.local):
    """The policy in force and the observer of one thread, on one device type."""

    in_force: Prepared | None = None
    observers: tuple[tuple[frozenset[str], Observer], ...] = ()
    """The ops that each watches, and the observer."""
    observer: Observer | None = None
    """All of `observers`, the last one outermost."""
    watched: frozenset[str] = frozenset()

    def observe_with(self, *observers: tuple[frozenset[str], Observer]) -> None:
        """Replace the observers."""
        self.observers = observers
        self.observer = functools.reduce(_around, [each for _, each in observers]) if observers else None
        self.watched = frozenset().union(*(ops for ops, _ in observers))


class Engine:
    """Manages the kernels that amp-core installs on one device type's Autocast key."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.key = autocast_key(device_type)
        self.local = ThreadState()
        self._lock = new_lock()
        self._users: Counter[str] = Counter()
        self._installed: dict[str, Callable[[], None]] = {}
        self._kernels: dict[str, tuple[str, Callable[..., Any]]] = {}
        self._kept: set[str] = set()

    @property
    def policy(self) -> OpPolicy | None:
        """The policy in force in this thread; None for the default."""
        in_force = self.local.in_force
        return None if in_force is None else in_force.policy

    def has_rule(self, op: Overload) -> bool:
        """Whether regions of this thread cast the arguments of `op` now: by a policy, or else by default."""
        if not has_kernel(dispatcher_name(op), self.key):
            return False
        name, in_force = names.full_name(op), self.local.in_force
        if in_force is not None and name in in_force.table:
            return in_force.policy.rules.get(name, r.UNCHANGED) != r.UNCHANGED
        if name not in self._installed:
            return True
        return name in native_rules(self.device_type) or name in added_rules(self.device_type)

    def add_rules(self) -> None:
        """Install the rules that amp-core adds to torch's own, for good; they hold in every region.

        That includes ``torch.autocast``: torch restores its own state alone when it recomputes a checkpoint.
        """
        added = added_rules(self.device_type)
        if not self._kept.issuperset(added):
            self.keep(added)

    def keep(self, ops: Iterable[str]) -> None:
        """Install the kernels of `ops` for good."""
        installed = tuple(ops)
        self._install(installed)
        with self._lock:
            self._kept.update(installed)
        self._uninstall(installed)

    def watch(self, ops: Iterable[str], observer: Observer) -> Callable[[], None]:
        """Let `observer` run each of `ops` in this thread, and every other op that a policy in force changes.

        The function it receives calls the previous observer, if there is one. Observations may end in any
        order. Ops whose rule is a Python function, by ``torch.library.register_autocast``, are left alone.

        Returns:
            A function that ends the observation; call it in the same thread. In another one it lets go of the
            kernels alone, as this thread may have ended; it may be called in both.
        """
        local = self.local
        watched = frozenset(op for op in ops if not self._has_python_rule(op))
        kernels = iter([self._installed_until(watched)])
        local.observe_with(*local.observers, (watched, observer))

        def end() -> None:
            local.observe_with(*(other for other in local.observers if other[1] is not observer))
            for uninstall in kernels:  # at most once, whichever thread is first
                uninstall()

        return end

    def _has_python_rule(self, op: str) -> bool:
        # torch registers the rules of its own ops in C++.
        return not op.startswith("aten::") and is_python_kernel(op.removesuffix(".default"), self.key)

    def serve_casts(self) -> Callable[[], None]:
        """Let low-precision ops use `weight_casts`, in every thread; return a function that ends this."""
        return self._installed_until(op for op in native_rules(self.device_type) if self._is_low(op))

    def _is_low(self, op: str) -> bool:
        return native_rules(self.device_type).get(op) == r.LOWER_PRECISION_FP

    # Installation.

    def _installed_until(self, ops: Iterable[str]) -> Callable[[], None]:
        installed = tuple(ops)
        self._install(installed)
        return functools.partial(self._uninstall, installed)

    def _install(self, ops: Iterable[str]) -> None:
        done: list[str] = []
        with self._lock:
            try:
                for op in ops:
                    self._users[op] += 1  # first: a finalizer may install and uninstall it on the next lines
                    done.append(op)
                    self._install_kernel(op)
            except BaseException:
                self._uninstall_locked(done)
                raise

    def _uninstall(self, ops: Iterable[str]) -> None:
        with self._lock:
            self._uninstall_locked(ops)

    def _uninstall_locked(self, ops: Iterable[str]) -> None:
        self._users.subtract(ops)
        if len(sys._current_frames()) > 1:
            return  # another thread may be about to call a kernel
        for op in [op for op in self._installed if op not in self._kept]:
            if not self._users[op] and op in self._installed:
                self._installed.pop(op)()

    def _install_kernel(self, name: str) -> None:
        if name in self._installed:
            return
        if name not in self._kernels:
            self._kernels[name] = self._make_kernel(name)
        op, kernel = self._kernels[name]
        remove = install(op, self.key, kernel)
        if self._installed.setdefault(name, remove) is not remove:
            remove()

    # Kernels.

    def _make_kernel(self, name: str) -> tuple[str, Callable[..., Any]]:
        install_fallthrough(self.key)
        native = once_defined(name, functools.partial(self._native, name))
        by_torch = _with_weight_casts(native, self.device_type) if self._is_low(name) else native
        local = self.local

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            in_force = local.in_force
            run = None if in_force is None else in_force.table.get(name)
            if local.observer is not None and (run is not None or name in local.watched):
                call = (
                    functools.partial(by_torch, keyset, *args, **kwargs)
                    if run is None
                    else functools.partial(run, keyset, args, kwargs)
                )
                return local.observer(name, call, args, kwargs)
            if run is None:
                return by_torch(keyset, *args, **kwargs)
            return run(keyset, args, kwargs)

        never_compile(kernel)
        return name.removesuffix(".default"), kernel

    def _native(self, name: str, overload: Overload) -> Callable[..., Any]:
        if name in (added := added_rules(self.device_type)):
            run = make_runner(overload, added[name], self.device_type)
            return lambda keyset, *args, **kwargs: run(keyset, args, kwargs)
        # An op that was defined after its kernel has this engine's kernel alone.
        if name not in self._installed and has_kernel(dispatcher_name(overload), self.key):
            return native_kernel(dispatcher_name(overload), self.key)
        return redispatch_below(overload, self.key)


def _with_weight_casts(native: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    replace = weight_casts.replace_weights

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return native(keyset, *replace(args, device_type), **kwargs)

    return run


def _around(earlier: Observer, observer: Observer) -> Observer:
    """Return an observer that has `observer` run what `earlier` runs."""

    def observe(name: str, call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return observer(name, lambda: earlier(name, call, args, kwargs), args, kwargs)

    return observe


_engines: dict[str, Engine] = {}
_engines_lock = new_lock()


def engine(device_type: str) -> Engine:
    """Return the process-wide engine of `device_type`."""
    known = _engines.get(device_type)
    if known is not None:  # `custom_fwd` and `custom_bwd` ask at each call
        return known
    with _engines_lock:
        if device_type not in _engines:
            _engines[device_type] = Engine(device_type)
        return _engines[device_type]


def policies_in_force() -> tuple[tuple[str, Prepared], ...]:
    """Return this thread's policies in force, each with its device type."""
    return tuple(
        (each.device_type, each.local.in_force)
        for each in list(_engines.values())
        if each.local.in_force is not None
    )


def serve_casts(source: weight_casts.CastSource, device_types: Iterable[str]) -> Callable[[], None]:
    """Let ops on `device_types` use the casts of `source`, in every thread; return a function that ends this.

    Device types without autocast are skipped.
    """
    ends = ExitStack()
    for device_type in sorted(device_types):
        if has_dispatch_key(autocast_key(device_type)):
            ends.callback(engine(device_type).serve_casts())
    ends.callback(weight_casts.sources.register(source))
    return ends.close
