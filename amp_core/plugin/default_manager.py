"""The one manager of this process, and the functions that use it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from types import MappingProxyType

from amp_core.errors import BackendError, BackendNotFoundError
from amp_core.plugin.interface import Backend
from amp_core.plugin.manager import Manager
from amp_core.plugin.status import BackendStatus

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
    backend = _manager.registry.get(device_type) if _manager is not None else None
    return backend or manager().get(device_type)


def op_lists(device_type: str) -> Mapping[str, str]:
    """Return the op lists of `device_type`; empty if nothing serves it."""
    try:
        get_backend(device_type)  # loads its plugin
    except BackendNotFoundError:
        return {}
    return manager().registry.op_lists(device_type)


def plugins_listen() -> bool:
    """Whether a plugin has a hook for an event."""
    return _manager is not None and _manager.listens


def call_plugins(hook: str, **event: object) -> None:
    """Call `hook` in every plugin that has it."""
    if plugins_listen():
        manager().call(hook, **event)


def register(plugin: object, name: str | None = None) -> None:
    """Register a plugin: a module or an object whose functions are marked with `hookimpl`.

    Args:
        plugin: has at least one hook of `amp_core.plugin.hookspecs`.
        name: for messages; by default its own.

    Raises:
        ValueError: it is registered already, or has no hook.
        pluggy.PluginValidationError: a hook is unknown, or takes an argument that it is not given.
    """
    manager().add(plugin, name)


def unregister(plugin: object) -> None:
    """Undo `register`.

    Raises:
        ValueError: it is not registered.
    """
    manager().remove(plugin)


def backends() -> Mapping[str, BackendStatus]:
    """Return, read-only, the status of every device type; loads all plugins to find out."""
    return MappingProxyType(manager().status())


def replace_backend(backend: Backend) -> Backend | None:
    """Serve ``backend.device_type`` with `backend` from now on; return the one that it replaces."""
    with contextlib.suppress(BackendError):  # loads the one to be replaced, whose op lists stay in force
        get_backend(backend.device_type)
    return manager().registry.replace(backend)
