"""Finds backends and hands them out. Nothing here runs when a region is entered or a step taken."""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType, ModuleType

import pluggy

from amp_core._torch import internals as _torch
from amp_core.common import environment as _env
from amp_core.common.call_site import level_outside
from amp_core.errors import (
    BackendConflictError,
    BackendDisabledError,
    BackendLoadError,
    BackendNotFoundError,
    PluginWarning,
)
from amp_core.plugin import spec
from amp_core.plugin.entry_points import Candidate, candidates, own_version
from amp_core.plugin.generic import TorchBackend
from amp_core.plugin.interface import Backend
from amp_core.plugin.registry import Owner, Registry
from amp_core.plugin.status import (
    BackendStatus,
    Failure,
    status_of,
    status_of_failure,
    unknown_text,
)

# Known as strings, loaded on demand: stale metadata can never lose the CPU.
BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "cpu": "amp_backend_cpu.hooks",
        "cuda": "amp_backend_cuda.hooks",
        "xpu": "amp_backend_xpu.hooks",
    }
)
_UNNAMED = "privateuseone"
_SCALER_HOOKS = ("amp_step", "amp_skip", "amp_scale_change")
TORCH_DEVICE_TYPES = ("hpu", "ipu", "maia", "mps", "mtia", "xla")


class Manager:
    """One pluggy host, one registry, one lock."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.failures: dict[str, Failure] = {}
        self._lock = threading.RLock()
        self._generic: dict[str, Backend] = {}
        self._tried: set[str] = set()
        self._pluggy = pluggy.PluginManager(spec.NAME)
        self._pluggy.add_hookspecs(spec)
        self.listens = False
        self._pluggy.hook.amp_register_backends.call_historic(kwargs={"registry": self.registry})

    def get(self, device_type: str) -> Backend:
        """Return the backend of `device_type`, loading its plugin on the first request."""
        device_type = _present_name(device_type)
        held = self.registry.get(device_type)
        if held is not None:
            return held[0]
        generic = self._generic.get(device_type)
        if generic is not None:
            return generic
        with self._lock:
            return self._find(device_type)

    def _find(self, device_type: str) -> Backend:
        disabled = _env.disabled_backends()
        if device_type in disabled:
            raise BackendDisabledError(
                f"The backend for {device_type!r} is switched off by "
                f"{_env.DISABLE_BACKENDS}={','.join(sorted(disabled))}. Unset it to use the device."
            )
        if device_type in BUILT_IN:
            self._load_built_in(device_type)
        elif _env.plugin_autoload():
            self._load_plugins_for(device_type)
        held = self.registry.get(device_type)
        if held is not None:
            return held[0]
        for failure in self._failures_of(device_type):
            raise BackendLoadError(
                f"The backend for {device_type!r} is installed but failed to load: {failure}."
            ) from failure.error
        return self._torch_backend(device_type)

    def _load_plugins_for(self, device_type: str) -> None:
        found = candidates()
        named = [c for c in found if c.device_type == device_type]
        # A plugin may serve types that its entry point does not name: where no name fits, ask all.
        self._load_all(named or found)

    def _failures_of(self, device_type: str) -> list[Failure]:
        return [f for f in self.failures.values() if f.owner.plugin == device_type]

    def _torch_backend(self, device_type: str) -> Backend:
        if not _torch.is_device_type(device_type) or not _torch.autocast_known(device_type):
            served = {name for name, _, _ in self.registry.items()}
            known = {*BUILT_IN, *served, *TORCH_DEVICE_TYPES} - _env.disabled_backends()
            raise BackendNotFoundError(unknown_text(device_type, known))
        return self._generic.setdefault(device_type, TorchBackend(device_type))

    def _load_built_ins(self) -> None:
        for device_type in BUILT_IN.keys() - _env.disabled_backends():
            self._load_built_in(device_type)

    def _load_built_in(self, device_type: str) -> None:
        # Outside any try: a fault of our own must surface.
        if self.registry.get(device_type) is None:
            module = importlib.import_module(BUILT_IN[device_type])
            self._register(module, _first_party(device_type, module))

    def _load_all(self, found: Iterable[Candidate]) -> None:
        disabled = _env.disabled_backends()
        theirs = [c for c in found if c.device_type not in disabled and not c.is_built_in(BUILT_IN)]
        if theirs:
            self._load_built_ins()  # first, so that no plugin can take their place
        for candidate in theirs:
            self._load(candidate, disabled)

    def _load(self, candidate: Candidate, disabled: frozenset[str]) -> None:
        key = f"{candidate.device_type}={candidate.entry_point.value}"
        if key in self._tried:
            self._raise_if_strict(self.failures.get(key))
            return
        self._tried.add(key)
        stage, owner, module = "import", candidate.owner(), None
        try:
            module = candidate.load()
            if self._pluggy.is_registered(module):
                return  # another entry point names the same module
            stage, owner = "register", candidate.owner(module)
            self._register(module, owner)
            self._pluggy.check_pending()
            self._check_added(candidate, owner)
        except BaseException as error:
            self._undo(owner, module)
            if not isinstance(error, Exception):
                self._tried.discard(key)  # interrupted: it may be asked for again
                raise
            self.failures[key] = failure = Failure(owner, stage, error)
            self._raise_if_strict(failure)
            _warn(failure)
        else:
            self.registry.drop(disabled.intersection(self.registry.added_by(owner)))

    def _undo(self, owner: Owner, module: ModuleType | None) -> None:
        self.registry.drop(self.registry.added_by(owner))
        # Before 1.7, pluggy keeps a plugin registered whose registration failed.
        if module is not None and self._pluggy.is_registered(module):
            self._pluggy.unregister(module)
            self._look_for_listeners()

    def add(self, plugin: object, name: str | None) -> None:
        """Register `plugin`, of any kind; undone if one of its hooks is unknown or takes a wrong argument."""
        with self._lock:
            if self._pluggy.is_registered(plugin):
                raise ValueError(f"{plugin!r} is already registered with amp-core.")
            try:
                self._pluggy.register(plugin, name)
                self._pluggy.check_pending()
                if not self._pluggy.get_hookcallers(plugin):
                    raise ValueError(_no_hooks(plugin))
            except BaseException:
                if self._pluggy.is_registered(plugin):  # see `_undo`
                    self._pluggy.unregister(plugin)
                raise
            self._look_for_listeners()

    def remove(self, plugin: object) -> None:
        """Undo `add`."""
        with self._lock:
            if not self._pluggy.is_registered(plugin):
                raise ValueError(f"{plugin!r} is not registered with amp-core, so it cannot be unregistered.")
            self._pluggy.unregister(plugin)
            self._look_for_listeners()

    def call(self, hook: str, **event: object) -> None:
        """Call `hook` in all plugins."""
        getattr(self._pluggy.hook, hook)(**event)

    def _look_for_listeners(self) -> None:
        self.listens = any(getattr(self._pluggy.hook, hook).get_hookimpls() for hook in _SCALER_HOOKS)

    def _check_added(self, candidate: Candidate, owner: Owner) -> None:
        added = self.registry.added_by(owner)
        if not added:
            raise BackendLoadError(
                f"its hooks registered no backend; {candidate.entry_point.value} must have a function "
                f"amp_register_backends(registry), marked with amp_core.plugin.hookimpl, that calls "
                f"registry.add()"
            )
        for device_type in BUILT_IN.keys() & set(added):  # free only because it is disabled
            raise BackendConflictError(
                f"{owner} wants to serve device type {device_type!r}, which is amp-core's own. "
                f"Call amp_core.plugin.replace_backend() to put another backend in its place."
            )

    def _register(self, module: ModuleType, owner: Owner) -> None:
        with self.registry.claimed(owner):
            self._pluggy.register(module, name=f"{owner.plugin}:{module.__name__}")
        self._look_for_listeners()

    def _raise_if_strict(self, failure: Failure | None) -> None:
        if failure is not None and _env.strict_plugins():
            raise BackendLoadError(f"{failure}.") from failure.error

    def discover(self) -> None:
        """Load every backend that is built in or declared by an entry point, and is not disabled."""
        with self._lock:
            self._load_built_ins()
            if _env.plugin_autoload():
                self._load_all(candidates())

    def replace(self, backend: Backend, owner: Owner) -> Backend | None:
        """Serve ``backend.device_type`` with `backend`; return the one that it replaces."""
        with self._lock:
            return self.registry.replace(backend, owner)

    def status(self) -> dict[str, BackendStatus]:
        """Describe every device type that is built in, declared, or known to torch."""
        with self._lock:
            self.discover()
            served = self.registry.items()
            failures = list(self.failures.values())
        found = {name: status_of(backend, owner) for name, backend, owner in served}
        for failure in failures:
            name = failure.owner.plugin
            if name in found:
                held = found[name]
                found[name] = replace(held, reason=f"{held.reason}; left out: {failure}")
            else:
                found[name] = status_of_failure(failure)
        for name in _env.disabled_backends() - found.keys():
            found[name] = BackendStatus("disabled", f"{_env.DISABLE_BACKENDS} names it", name)
        found.update(self._status_of_generic(found))
        return dict(sorted(found.items()))

    def _status_of_generic(self, others: Mapping[str, BackendStatus]) -> dict[str, BackendStatus]:
        # Nobody has claimed the slot for devices out of torch's tree while it has its own name.
        names = {*TORCH_DEVICE_TYPES, _torch.privateuse1_name()} - {_UNNAMED} - others.keys()
        known = [name for name in names if _torch.autocast_known(name)]
        return {name: status_of(self._torch_backend(name), Owner("torch")) for name in known}


def _first_party(device_type: str, module: ModuleType) -> Owner:
    return Owner(device_type, "amp-core", own_version(), os.path.dirname(module.__file__ or ""))


def _present_name(device_type: str) -> str:
    # torch goes on accepting the slot's own name after a device has given it another.
    return _torch.privateuse1_name() if device_type == _UNNAMED else device_type


def _no_hooks(plugin: object) -> str:
    known = ", ".join(sorted(spec.__all__))
    return (
        f"{plugin!r} has no hook of amp-core's. A hook is a function or method with one of the names "
        f"{known}, marked with amp_core.plugin.hookimpl."
    )


def _warn(failure: Failure) -> None:
    warnings.warn(
        f"{failure}. It was left out; other backends are not affected. Set "
        f"{_env.DISABLE_BACKENDS}={failure.owner.plugin} to silence this, or "
        f"{_env.STRICT_PLUGINS}=1 to raise the error.",
        PluginWarning,
        stacklevel=level_outside(),
    )
