"""Describe backends, for `amp_core.backends`, warnings and errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from amp_core._torch.autocast import is_device_type
from amp_core.common import environment as _env
from amp_core.plugin.entry_points import ENTRY_POINT_GROUP
from amp_core.plugin.interface import Backend
from amp_core.plugin.registry import Owner
from amp_core.plugin.results import described


@dataclass(frozen=True)
class BackendStatus:
    """One device type's entry in the result of `backends`.

    Attributes:
        status: ``"available"``, ``"absent"`` (loaded, but no such device is present), ``"failed"``
            (installed, but did not load, or is for a device type that torch does not know) or
            ``"disabled"``.
        reason: a human-readable explanation, on one line.
        plugin: the entry point that provides the backend, or ``"torch"`` for the generic one.
        distribution: the distribution that provides it; empty for the generic backend.
        version: the version of that distribution.
        path: the folder that contains its module.
    """

    status: str
    reason: str
    plugin: str = ""
    distribution: str = ""
    version: str = ""
    path: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", " ".join(self.reason.split()))


@dataclass(frozen=True)
class Failure:
    """A plugin that failed to load, and the stage: ``requirements``, ``import`` or ``register``."""

    owner: Owner
    stage: str
    error: BaseException

    def __str__(self) -> str:
        return f"{self.owner} failed at stage {self.stage!r} with {described(self.error).rstrip('.: ')}"


def status_of(backend: Backend, owner: Owner) -> BackendStatus:
    """Return the status of `backend`; ``"failed"`` if it cannot say, or torch does not know the device."""
    try:
        now = backend.availability()
        status, reason = "available" if now.usable else "absent", now.reason
    except Exception as error:
        status, reason = "failed", str(error)
    if status == "available" and not is_device_type(backend.device_type):
        status, reason = "failed", unknown_to_torch(backend)
    return BackendStatus(status, reason, owner.plugin, owner.distribution, owner.version, owner.path)


def status_of_failure(failure: Failure) -> BackendStatus:
    """Return the status of a device type whose plugin failed to load."""
    owner = failure.owner
    return BackendStatus("failed", str(failure), owner.plugin, owner.distribution, owner.version)


def unknown_to_torch(backend: Backend) -> str:
    """Return the error text for a backend whose device type torch does not know."""
    return (
        f"{type(backend).__name__} of {backend.origin or type(backend).__module__} serves device type "
        f"{backend.device_type!r}, which torch does not know. Import the package that adds the device to "
        f"torch in the plugin's hooks, or correct device_type."
    )


def unknown_text(device_type: str, known: Iterable[str], aliases: Mapping[str, str]) -> str:
    """Return the error text for a device type without a backend."""
    names = sorted(known)
    near = aliases.get(device_type.lower()) or next(
        iter(difflib.get_close_matches(device_type.lower(), names, n=1)), None
    )
    hint = f" Did you mean {near!r}?" if near else ""
    known_ones = f"No backend serves device type {device_type!r}.{hint} Installed: {', '.join(names)}. "
    if device_type == "auto" or not device_type.isidentifier():  # no package can add it
        return f"{known_ones}A backend is found by the type of its device, such as 'cuda', without an index."
    off = "" if _env.plugin_autoload() else f" {_env.PLUGIN_AUTOLOAD} is off, so no such package is loaded."
    return (
        f"{known_ones}To add a device, install a package that declares the entry point "
        f"'{ENTRY_POINT_GROUP}' under the name {device_type!r}; `amp backends` lists the installed ones.{off}"
    )
