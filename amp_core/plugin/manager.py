"""Finds backends and hands them out. Nothing here runs when a region is entered or a step taken."""

from __future__ import annotations

import difflib
import importlib
import os
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType

import pluggy

from amp_core import _env, _torch
from amp_core.errors import (
    BackendDisabledError,
    BackendLoadError,
    BackendNotFoundError,
    PluginWarning,
)
from amp_core.plugin import spec
from amp_core.plugin.entry_points import ENTRY_POINT_GROUP, Candidate, candidates, own_version
from amp_core.plugin.generic import TorchBackend
from amp_core.plugin.interface import Backend
from amp_core.plugin.registry import Owner, Registry

# Known as strings, loaded on demand: stale metadata can never lose the CPU.
BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "cpu": "amp_backend_cpu.hooks",
        "cuda": "amp_backend_cuda.hooks",
        "xpu": "amp_backend_xpu.hooks",
    }
)
TORCH_DEVICE_TYPES = ("hpu", "ipu", "maia", "mps", "mtia", "xla")
_NEAR = {"gpu": "cuda", "nvidia": "cuda", "hip": "cuda", "rocm": "cuda", "intel": "xpu", "metal": "mps"}


@dataclass(frozen=True)
class BackendStatus:
    """What `backends` says of one device type.

    Attributes:
        status: ``"available"``, ``"absent"`` (loaded, but the device is not there), ``"failed"``
            (installed, but did not load) or ``"disabled"``.
        reason: why, in words.
        plugin: the entry point that brought it, or ``"torch"`` for the generic backend.
        distribution: the distribution it is from, with `version`; empty for the generic backend.
        path: the folder that its module is in.
    """

    status: str
    reason: str
    plugin: str = ""
    distribution: str = ""
    version: str = ""
    path: str = ""


@dataclass(frozen=True)
class Failure:
    """A plugin that did not load, and at which stage (``import``, ``register``)."""

    owner: Owner
    stage: str
    error: Exception


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
        self._pluggy.hook.amp_register_backends.call_historic(kwargs={"registry": self.registry})

    def get(self, device_type: str) -> Backend:
        """Return the backend of `device_type`, loading its plugin on the first request."""
        held = self.registry.get(device_type)
        if held is not None:
            return held[0]
        with self._lock:
            return self._find(device_type)

    def _find(self, device_type: str) -> Backend:
        if device_type in _env.disabled_backends():
            raise BackendDisabledError(
                f"The backend for {device_type!r} is switched off by "
                f"{_env.DISABLE_BACKENDS}={','.join(sorted(_env.disabled_backends()))}. "
                f"Unset it to use the device."
            )
        if device_type in BUILT_IN:
            self._load_built_in(device_type)
        elif _env.plugin_autoload():
            self._load_all([c for c in candidates() if c.device_type == device_type])
        held = self.registry.get(device_type)
        if held is not None:
            return held[0]
        if device_type in self.failures:
            failure = self.failures[device_type]
            raise BackendLoadError(
                f"The backend for {device_type!r} is installed but failed to load: {_describe(failure)}."
            ) from failure.error
        return self._torch_backend(device_type)

    def _torch_backend(self, device_type: str) -> Backend:
        if device_type in self._generic:
            return self._generic[device_type]
        if not _torch.is_device_type(device_type) or not _torch.autocast_known(device_type):
            raise BackendNotFoundError(self._unknown(device_type))
        return self._generic.setdefault(device_type, TorchBackend(device_type))

    def _load_built_in(self, device_type: str) -> None:
        # Outside any try: a fault of our own must surface.
        if self.registry.get(device_type) is None:
            module = importlib.import_module(BUILT_IN[device_type])
            self._register(module, _first_party(device_type, module))

    def _load_all(self, found: list[Candidate]) -> None:
        disabled = _env.disabled_backends()
        if found:
            for device_type in BUILT_IN:  # first, so that no plugin can take their place
                if device_type not in disabled:
                    self._load_built_in(device_type)
        for candidate in found:
            if candidate.device_type not in disabled and not candidate.is_built_in(BUILT_IN):
                self._load(candidate)

    def _load(self, candidate: Candidate) -> None:
        key = f"{candidate.device_type}={candidate.entry_point.value}"
        if key in self._tried:
            return
        self._tried.add(key)
        stage, module = "import", None
        before = self.registry.snapshot()
        try:
            module = candidate.load()
            stage = "register"
            self._register(module, candidate.owner(module))
            self._pluggy.check_pending()
            self._check_added(candidate, before)
        except Exception as error:
            self.registry.restore(before)
            if module is not None and self._pluggy.is_registered(module):
                self._pluggy.unregister(module)
            self._report(Failure(candidate.owner(), stage, error))

    def _check_added(self, candidate: Candidate, before: Mapping[str, object]) -> None:
        if len(self.registry.snapshot()) == len(before):
            raise BackendLoadError(
                f"its hooks registered no backend; {candidate.entry_point.value} must have a function "
                f"amp_register_backends(registry), marked with amp_core.plugin.hookimpl, that calls "
                f"registry.add()"
            )

    def _register(self, module: ModuleType, owner: Owner) -> None:
        self.registry.claim(owner)
        try:
            self._pluggy.register(module, name=f"{owner.plugin}:{module.__name__}")
        finally:
            self.registry.claim(None)

    def _report(self, failure: Failure) -> None:
        self.failures[failure.owner.plugin] = failure
        if _env.strict_plugins():
            raise BackendLoadError(f"{_describe(failure)}.") from failure.error
        warnings.warn(
            f"{_describe(failure)}. It was left out; other backends are not affected. Set "
            f"{_env.DISABLE_BACKENDS}={failure.owner.plugin} to silence this, or "
            f"{_env.STRICT_PLUGINS}=1 to raise the error.",
            PluginWarning,
            stacklevel=2,
        )

    def discover(self) -> None:
        """Load every backend that is built in or declared by an entry point, and is not disabled."""
        with self._lock:
            disabled = _env.disabled_backends()
            for device_type in BUILT_IN:
                if device_type not in disabled:
                    self._load_built_in(device_type)
            if _env.plugin_autoload():
                self._load_all(candidates())

    def status(self) -> dict[str, BackendStatus]:
        """Describe every device type that is built in, declared, or known to torch."""
        self.discover()
        found: dict[str, BackendStatus] = {}
        for device_type, backend, owner in self.registry.items():
            found[device_type] = _status(backend, owner)
        for name, failure in self.failures.items():
            o = failure.owner
            found.setdefault(
                name,
                BackendStatus("failed", _describe(failure), name, o.distribution, o.version),
            )
        for name in _env.disabled_backends():
            found[name] = BackendStatus("disabled", f"{_env.DISABLE_BACKENDS} names it", name)
        for name in (*TORCH_DEVICE_TYPES, _torch.privateuse1_name()):
            # Nobody has claimed the slot for devices out of torch's tree while it has its own name.
            if name not in found and name != "privateuseone" and _torch.autocast_known(name):
                found[name] = _status(self._torch_backend(name), Owner("torch"))
        return dict(sorted(found.items()))

    def _unknown(self, device_type: str) -> str:
        declared = {c.device_type for c in candidates()} if _env.plugin_autoload() else set()
        known = sorted({*BUILT_IN, *declared, *TORCH_DEVICE_TYPES} - _env.disabled_backends())
        near = _NEAR.get(device_type.lower()) or next(
            iter(difflib.get_close_matches(device_type.lower(), known, n=1)), None
        )
        hint = f" Did you mean {near!r}?" if near else ""
        return (
            f"No backend serves device type {device_type!r}.{hint} Installed: {', '.join(known)}. "
            f"To add a device, install a package that declares the entry point "
            f"'{ENTRY_POINT_GROUP}' under the name {device_type!r}; `amp backends` lists what is there."
        )


def _first_party(device_type: str, module: ModuleType) -> Owner:
    return Owner(device_type, "amp-core", own_version(), os.path.dirname(module.__file__ or ""))


def _status(backend: Backend, owner: Owner) -> BackendStatus:
    try:
        now = backend.availability()
    except Exception as error:
        return BackendStatus(
            "failed",
            f"availability() of {owner} raised {type(error).__name__}: {error}",
            owner.plugin,
            owner.distribution,
            owner.version,
            owner.path,
        )
    status = "available" if now.usable else "absent"
    return BackendStatus(status, now.reason, owner.plugin, owner.distribution, owner.version, owner.path)


def _describe(failure: Failure) -> str:
    error = failure.error
    return f"{failure.owner} failed at stage {failure.stage!r} with {type(error).__name__}: {error}"


_manager: Manager | None = None
_manager_lock = threading.Lock()


def manager() -> Manager:
    """Return the manager of this process."""
    global _manager  # noqa: PLW0603  # one per process, built on first use
    if _manager is None:
        with _manager_lock:
            if _manager is None:
                _manager = Manager()
    return _manager


def get_backend(device_type: str) -> Backend:
    """Return the backend of `device_type`.

    Raises:
        BackendNotFoundError: nothing serves it; the text lists what is installed.
        BackendLoadError: its plugin failed to load; the original error is the cause.
        BackendDisabledError: ``AMP_DISABLE_BACKENDS`` names it.
    """
    held = _manager.registry.get(device_type) if _manager is not None else None
    return held[0] if held is not None else manager().get(device_type)


def backends() -> Mapping[str, BackendStatus]:
    """Return, read-only, the status of every device type, loading all plugins to find out."""
    return MappingProxyType(manager().status())


def replace_backend(backend: Backend) -> Backend | None:
    """Serve ``backend.device_type`` with `backend` from now on; return the one that it replaces."""
    return manager().registry.replace(backend, Owner(type(backend).__module__))
