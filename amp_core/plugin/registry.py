"""Backends by device type, each with its owner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from amp_core.errors import BackendConflictError, BackendLoadError
from amp_core.plugin.interface import API_VERSION, Backend


@dataclass(frozen=True)
class Owner:
    """The plugin that brought a backend: entry-point name, distribution, its version, module path."""

    plugin: str
    distribution: str = ""
    version: str = ""
    path: str = ""

    def __str__(self) -> str:
        source = f" ({self.distribution} {self.version})".replace(" )", ")")
        return f"plugin {self.plugin!r}" + (source if self.distribution else "")


class Registry:
    """What the hook `amp_register_backends` receives: `add` is for plugins, the rest for the manager."""

    def __init__(self) -> None:
        self._backends: dict[str, tuple[Backend, Owner]] = {}
        self._owner: Owner | None = None

    def add(self, backend: Backend) -> None:
        """Register `backend` for its ``device_type``.

        Raises:
            TypeError: `backend` is not a `Backend` instance, or lacks a device type.
            BackendLoadError: it was written against another version of the contract.
            BackendConflictError: another plugin already serves the device type.
        """
        owner = self._owner or Owner(type(backend).__module__)
        _check(backend, owner)
        held = self._backends.get(backend.device_type)
        if held is not None:
            raise BackendConflictError(
                f"{owner} wants to serve device type {backend.device_type!r}, which {held[1]} "
                f"already serves. Uninstall one of the two, or call amp_core.plugin.replace_backend()."
            )
        self._backends[backend.device_type] = (backend, owner)

    def replace(self, backend: Backend, owner: Owner) -> Backend | None:
        """Register `backend` in place of any other; return the one that it replaced."""
        _check(backend, owner)
        held = self._backends.get(backend.device_type)
        self._backends[backend.device_type] = (backend, owner)
        return held[0] if held else None

    def get(self, device_type: str) -> tuple[Backend, Owner] | None:
        """Return the backend of `device_type` and its owner, if there is one."""
        return self._backends.get(device_type)

    def items(self) -> list[tuple[str, Backend, Owner]]:
        """Return (device type, backend, owner), sorted by device type."""
        return [(name, *self._backends[name]) for name in sorted(self._backends)]

    def added_by(self, owner: Owner) -> list[str]:
        """Return the device types that `owner` serves."""
        return [name for name, (_, whose) in self._backends.items() if whose == owner]

    def drop(self, device_types: Iterable[str]) -> None:
        """Forget the backends of `device_types`."""
        for name in device_types:
            self._backends.pop(name, None)

    @contextmanager
    def claimed(self, owner: Owner) -> Iterator[None]:
        """Count what is added meanwhile as brought by `owner`."""
        outer, self._owner = self._owner, owner  # a plugin may ask for another while it loads
        try:
            yield
        finally:
            self._owner = outer

    def snapshot(self) -> dict[str, tuple[Backend, Owner]]:
        """Return the present content, for `restore`."""
        return dict(self._backends)

    def restore(self, content: dict[str, tuple[Backend, Owner]]) -> None:
        """Put back what `snapshot` returned."""
        self._backends = content


def _check(backend: Backend, owner: Owner) -> None:
    if not isinstance(backend, Backend):
        what = f"class {backend.__name__}; instantiate it" if isinstance(backend, type) else repr(backend)
        raise TypeError(f"{owner} added {what}, which is not an amp_core.plugin.Backend instance.")
    name = type(backend).__name__
    device_type = getattr(backend, "device_type", None)
    if not isinstance(device_type, str) or not device_type:
        raise TypeError(f"{name} of {owner} must set device_type to a non-empty string.")
    version = getattr(backend, "api_version", None)
    if version != API_VERSION:
        raise BackendLoadError(
            f"{name} of {owner} implements backend API {version!r}; this amp_core speaks {API_VERSION}. "
            f"Install a version of the plugin made for this amp_core."
        )
