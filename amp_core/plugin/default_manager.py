"""The process-wide plugin manager, and the functions that use it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType

from amp_core._torch.tracing import untraced
from amp_core.common.arguments import named
from amp_core.common.locks import new_lock
from amp_core.errors import BackendError
from amp_core.plugin.interface import Backend
from amp_core.plugin.manager import Manager
from amp_core.plugin.status import BackendStatus

_manager: Manager | None = None
_manager_lock = new_lock()


def manager() -> Manager:
    """Return the process-wide manager, creating it on first use."""
    global _manager  # noqa: PLW0603  # one per process, built on first use
    if _manager is None:
        with _manager_lock:
            if _manager is None:
                new = Manager()
                _manager = _manager or new  # a signal handler may have asked meanwhile
    return _manager


def get_backend(device_type: str) -> Backend:
    """Return the backend of `device_type`, loading its plugin on first use.

    Args:
        device_type: a device type, such as ``"cuda"``.

    Returns:
        The backend, whether or not such a device is present.

    Raises:
        BackendNotFoundError: no backend serves the device type; the message lists the installed ones.
        BackendLoadError: its plugin failed to load; the original error is the ``__cause__``.
        BackendDisabledError: ``AMP_DISABLE_BACKENDS`` names the device type.
        TypeError: `device_type` is no string.

    Example:
        >>> from amp_core.plugin import get_backend
        >>> get_backend("cpu").default_dtype()
        torch.bfloat16
    """
    if _manager is not None and isinstance(device_type, str):
        backend = _manager.registry.get(device_type)
        if backend is not None:
            return backend
    return manager().get(device_type)


def op_lists(device_type: str) -> Mapping[str, str]:
    """Return the op lists of `device_type`.

    Raises:
        BackendNotFoundError: no backend serves the device type.
    """
    get_backend(device_type)  # loads its plugin
    return manager().registry.op_lists(device_type)


def plugins_listen() -> bool:
    """Return whether any plugin implements an event hook."""
    return _manager is not None and _manager.listens


def call_plugins(hook: str, **event: object) -> None:
    """Call `hook` in every plugin that has it."""
    if plugins_listen():
        manager().call(hook, **event)


def register(plugin: object, name: str | None = None) -> None:
    """Register a plugin: a module or an object with functions marked with `hookimpl`.

    Args:
        plugin: implements at least one hook of `amp_core.plugin.hookspecs`.
        name: the name in messages; defaults to the plugin's own.

    Raises:
        ValueError: the plugin is already registered, has no hook, or is a class in place of an instance.
        pluggy.PluginValidationError: a hook is unknown, or declares an unknown argument.
    """
    manager().add(plugin, name)


def unregister(plugin: object) -> None:
    """Undo `register`.

    Args:
        plugin: the registered plugin.

    Raises:
        ValueError: the plugin is not registered, or was found by its entry point.
    """
    manager().remove(plugin)


@untraced
def backends() -> Mapping[str, BackendStatus]:
    """Return the status of every device type, loading all plugins.

    Returns:
        A read-only mapping from device type to `BackendStatus`, sorted by name.

    Raises:
        BackendLoadError: a plugin failed to load and ``AMP_STRICT_PLUGINS`` is set.

    Warns:
        PluginWarning: a plugin failed to load and was skipped.

    Example:
        >>> import amp_core
        >>> amp_core.backends()["cpu"].status
        'available'
    """
    return MappingProxyType(manager().status())


def replace_backend(backend: Backend) -> Backend | None:
    """Use `backend` for its ``device_type`` from now on, in place of any other backend.

    Args:
        backend: the new backend.

    Returns:
        The backend it replaces, loaded if necessary; None if there was none.

    Raises:
        TypeError: `backend` is not a `Backend` instance, or has no device type.
        BackendLoadError: `backend` implements another version of the backend API.

    Example:
        >>> import torch
        >>> from amp_core.plugin import get_backend, replace_backend
        >>> class Float16Cpu(type(get_backend("cpu"))):
        ...     def default_dtype(self):
        ...         return torch.float16
        >>> previous = replace_backend(Float16Cpu())
        >>> get_backend("cpu").default_dtype()
        torch.float16
        >>> replaced = replace_backend(previous)
    """
    if not isinstance(backend, Backend):
        raise TypeError(
            f"replace_backend() needs an instance of amp_core.plugin.Backend, not {named(backend)}."
        )
    with contextlib.suppress(BackendError):  # load the backend to be replaced: its op lists stay in force
        get_backend(backend.device_type)
    return manager().registry.replace(backend)
