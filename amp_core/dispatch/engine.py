"""Puts Python kernels on an Autocast key while a policy that differs from torch's is in force.

The dispatcher is one per process, a policy belongs to a thread. So the kernel of an op, while some thread
needs it, asks its own thread's table what to do; a thread without a policy runs torch's kernel, which was
taken hold of before. When the last region that needs an op is left, torch's kernel is put back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from amp_core._torch.dispatcher import (
    Overload,
    autocast_key,
    dispatcher_name,
    has_kernel,
    install,
    install_fallthrough,
    key_set,
    native_kernel,
)
from amp_core.dispatch import weights
from amp_core.dispatch.casting import Runner
from amp_core.policy import OpPolicy, names

Table = Mapping[str, "Runner | None"]
"""Full op name to what runs it; None for torch's own kernel."""

Observer = Callable[[str, Callable[[], Any], tuple[Any, ...], dict[str, Any]], Any]
"""Given an op's full name, what runs it, and its arguments; runs it and returns its result."""

_EMPTY: Table = {}


class _Local(threading.local):
    """One thread's policies on one device: what is in force, and what that hides."""

    table: Table = _EMPTY
    policy: OpPolicy | None = None
    observer: Observer | None = None

    def __init__(self) -> None:
        self.hidden: list[tuple[Table, OpPolicy | None, Iterable[str]]] = []


class Engine:
    """All policies on one device type's Autocast key."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.key = autocast_key(device_type)
        self.local = _Local()
        self._lock = threading.Lock()
        self._installed: dict[str, tuple[int, Callable[[], None]]] = {}
        self._kernels: dict[str, tuple[str, Callable[..., Any]]] = {}

    @property
    def depth(self) -> int:
        """How many policies this thread has pushed."""
        return len(self.local.hidden)

    @property
    def policy(self) -> OpPolicy | None:
        """What is in force in this thread; None for the default."""
        return self.local.policy

    @property
    def installed(self) -> frozenset[str]:
        """The ops that run through a kernel of this engine now, in any thread."""
        with self._lock:
            return frozenset(self._installed)

    def push(self, table: Table, policy: OpPolicy | None) -> None:
        """Put `policy`, as `table`, in force for this thread. If an install fails, all is as before."""
        self._hold(table)
        local = self.local
        local.hidden.append((local.table, local.policy, tuple(table)))
        local.table, local.policy = table, policy

    def push_again(self) -> None:
        """Push what is in force already."""
        self.push(self.local.table, self.local.policy)

    def pop(self) -> None:
        """Take the last table off. Without a push before it, does nothing."""
        local = self.local
        if not local.hidden:
            return
        local.table, local.policy, ops = local.hidden.pop()
        if not local.hidden:
            weights.clear()
        self._release(ops)

    @property
    def observer(self) -> Observer | None:
        """Who watches this thread's autocast kernels."""
        return self.local.observer

    def watch(self, ops: Iterable[str], observer: Observer) -> Callable[[], None]:
        """Let `observer` run each of `ops` in this thread, and all ops that have a policy's kernel.

        An observer before it is called by what it runs. Return what ends that, for the same thread.
        """
        held, local, earlier = tuple(ops), self.local, self.local.observer
        self._hold(held)
        local.observer = observer if earlier is None else _both(observer, earlier)

        def end() -> None:
            local.observer = earlier
            self._release(held)

        return end

    def _hold(self, ops: Iterable[str]) -> None:
        held: list[str] = []
        with self._lock:
            try:
                for op in ops:
                    count, remove = self._installed.get(op, (0, None))
                    self._installed[op] = (count + 1, remove or self._install(op))
                    held.append(op)
            except BaseException:
                self._release_locked(held)
                raise

    def _release(self, ops: Iterable[str]) -> None:
        with self._lock:
            self._release_locked(ops)

    def _release_locked(self, ops: Iterable[str]) -> None:
        for op in ops:
            count, remove = self._installed[op]
            if count > 1:
                self._installed[op] = (count - 1, remove)
            else:
                del self._installed[op]
                remove()

    def _install(self, name: str) -> Callable[[], None]:
        if name not in self._kernels:
            self._kernels[name] = self._make_kernel(name)
        dispatcher_name, kernel = self._kernels[name]
        return install(dispatcher_name, self.key, kernel)

    def _make_kernel(self, name: str) -> tuple[str, Callable[..., Any]]:
        install_fallthrough(self.key)
        overload = names.find(name)
        assert overload is not None, f"{name} was admitted to a policy but is gone from the dispatcher"
        native = self._native(overload)
        local = self.local

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            run = local.table.get(name)
            if local.observer is not None:
                here = functools.partial(native, keyset, *args, **kwargs)
                call = here if run is None else functools.partial(run, keyset, args, kwargs)
                return local.observer(name, call, args, kwargs)
            if run is None:
                return native(keyset, *args, **kwargs)
            return run(keyset, args, kwargs)

        return dispatcher_name(overload), kernel

    def _native(self, overload: Overload) -> Callable[..., Any]:
        if has_kernel(dispatcher_name(overload), self.key):
            return native_kernel(dispatcher_name(overload), self.key)
        keys = key_set(self.key)

        def fall_through(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            return overload.redispatch(keyset - keys, *args, **kwargs)

        return fall_through


def _both(observer: Observer, earlier: Observer) -> Observer:
    def observe(name: str, call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return observer(name, lambda: earlier(name, call, args, kwargs), args, kwargs)

    return observe


_engines: dict[str, Engine] = {}
_engines_lock = threading.Lock()


def engine(device_type: str) -> Engine:
    """Return the engine of `device_type`, one per process."""
    with _engines_lock:
        if device_type not in _engines:
            _engines[device_type] = Engine(device_type)
        return _engines[device_type]
