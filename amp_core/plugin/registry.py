"""Backends by device type, each with its owner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from amp_core.common.arguments import ANOTHER_COPY, is_of_another_copy
from amp_core.common.identity import WeakIdentityMapping
from amp_core.errors import BackendConflictError, BackendLoadError
from amp_core.plugin.interface import API_VERSION, Backend
from amp_core.plugin.results import wrong_attribute

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Owner:
    """The plugin that registered a backend.

    Attributes:
        plugin: the name of its entry point; the module of the class of a backend registered in code.
        distribution: the package that declares it; empty for one registered in code.
        version: the version of that package.
        path: the folder of the plugin's module.
    """

    plugin: str
    distribution: str = ""
    version: str = ""
    path: str = ""

    def __str__(self) -> str:
        source = f" ({self.distribution} {self.version})".replace(" )", ")")
        return f"plugin {self.plugin!r}" + (source if self.distribution else "")


class Registry:
    """The argument of the hook `amp_register_backends`. Plugins call `add`; the rest is for the manager."""

    def __init__(self) -> None:
        self._backends: dict[str, tuple[Backend, Owner]] = {}
        self._fallbacks: dict[str, list[tuple[Backend, Owner]]] = {}
        self._op_lists: dict[str, Mapping[str, str]] = {}
        self._owners = WeakIdentityMapping[Backend, Owner]()
        self._owner: Owner | None = None

    def add(self, backend: Backend, *, fallback: bool = False) -> None:
        """Register `backend` for its ``device_type``.

        Args:
            backend: the backend.
            fallback: use it only while no other plugin serves the device type; a later fallback takes
                precedence over an earlier one.

        Raises:
            TypeError: `backend` is not a `Backend` instance, or has no device type.
            BackendLoadError: `backend` implements another version of the backend API.
            BackendConflictError: another plugin already serves the device type.
        """
        owner = self._owner or Owner(type(backend).__module__)
        _check(backend, owner)
        if fallback:
            self._own(backend, owner)
            earlier = self._fallbacks.get(backend.device_type, [])
            self._fallbacks[backend.device_type] = [*earlier, (backend, owner)]
        elif backend.device_type in self._backends:
            if self._backends[backend.device_type][1] == owner:
                raise BackendConflictError(
                    f"{owner} adds two backends for device type {backend.device_type!r}. Add one of them."
                )
            raise BackendConflictError(
                f"{owner} wants to serve device type {backend.device_type!r}, which "
                f"{self._backends[backend.device_type][1]} already serves. Uninstall one of the two, or call "
                f"amp_core.plugin.replace_backend()."
            )
        else:
            self._put(backend, owner)

    def replace(self, backend: Backend) -> Backend | None:
        """Register `backend` in place of any other for its device type; return the one it replaced.

        A backend that a plugin registered before stays that plugin's.
        """
        owner = self._owners.get(backend) or Owner(type(backend).__module__)
        _check(backend, owner)
        previous = self.get(backend.device_type)
        self._put(backend, owner)
        return previous

    def _own(self, backend: Backend, owner: Owner) -> None:
        backend.origin = str(owner)
        self._owners[backend] = owner

    def _put(self, backend: Backend, owner: Owner) -> None:
        self._own(backend, owner)
        if backend.op_lists:
            self._op_lists[backend.device_type] = backend.op_lists
        self._backends[backend.device_type] = (backend, owner)  # last: other threads look here first

    def op_lists(self, device_type: str) -> Mapping[str, str]:
        """Return the op lists of `device_type`; empty if no backend has any.

        They describe torch's kernels, so a backend without lists takes over those of the one it replaces.
        """
        fallback = self.fallback(device_type)
        return self._op_lists.get(device_type, {} if fallback is None else fallback[0].op_lists)

    def get(self, device_type: str) -> Backend | None:
        """Return the backend of `device_type`, or None."""
        entry = self._backends.get(device_type)
        return None if entry is None else entry[0]

    def fallback(self, device_type: str) -> tuple[Backend, Owner] | None:
        """Return the latest fallback backend of `device_type` and its owner, or None."""
        fallbacks = self._fallbacks.get(device_type)
        return fallbacks[-1] if fallbacks else None

    def added(self) -> list[tuple[Backend, Owner]]:
        """Return all backends, also fallbacks, each with its owner."""
        return [*self._backends.values(), *chain.from_iterable(self._fallbacks.values())]

    def aliases(self) -> dict[str, str]:
        """Return all aliases, each with its device type."""
        return {alias: backend.device_type for backend, _ in self.added() for alias in backend.aliases}

    def __getitem__(self, device_type: str) -> tuple[Backend, Owner]:
        return self._backends[device_type]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._backends))

    def drop(self, owner: Owner, device_types: frozenset[str] | None = None) -> None:
        """Remove the backends that `owner` registered, or only those for `device_types`."""
        self.withdraw(
            backend
            for backend, whose in self.added()
            if whose == owner and (device_types is None or backend.device_type in device_types)
        )

    def withdraw(self, backends: Iterable[Backend]) -> None:
        """Remove `backends` where they still serve."""
        for backend in backends:
            name = backend.device_type
            if self.get(name) is backend:
                del self._backends[name]
                self._op_lists.pop(name, None)  # what replaced another keeps the lists
            self._fallbacks[name] = [each for each in self._fallbacks.get(name, []) if each[0] is not backend]

    @contextmanager
    def claimed(self, owner: Owner) -> Iterator[None]:
        """Record `owner` as the owner of every backend added inside the block."""
        outer, self._owner = self._owner, owner  # a plugin may load another one while it loads
        try:
            yield
        finally:
            self._owner = outer

    @contextmanager
    def serving(self, backend: Backend) -> Iterator[None]:
        """Register `backend` inside the block, and what served its device type before after it."""
        name = backend.device_type
        before, lists = self._backends.get(name), self._op_lists.get(name)
        self.replace(backend)
        try:
            yield
        finally:
            _set(self._backends, name, before)
            _set(self._op_lists, name, lists)


def _set(table: dict[str, _Value], name: str, value: _Value | None) -> None:
    if value is None:
        table.pop(name, None)
    else:
        table[name] = value


def _check(backend: Backend, owner: Owner) -> None:
    if not isinstance(backend, Backend):
        what, fix = repr(backend), "derive its class from amp_core.plugin.Backend"
        if isinstance(backend, type):
            what, fix = f"the class {backend.__name__}", f"call registry.add({backend.__name__}())"
        elif is_of_another_copy(backend, Backend):
            fix = f"it derives from that of {ANOTHER_COPY}"
        raise TypeError(f"{owner} added {what}, which is no amp_core.plugin.Backend instance; {fix}.")
    name = type(backend).__name__
    device_type = getattr(backend, "device_type", None)
    if not isinstance(device_type, str) or not device_type.isidentifier() or not device_type.islower():
        found = "a method" if callable(device_type) else repr(device_type)
        raise TypeError(
            f"{name} of {owner} must set device_type to the `type` of a torch.device, such as 'npu', in "
            f"lower case and without an index; it is {found}."
        )
    version = getattr(backend, "api_version", None)
    if not isinstance(version, int) or isinstance(version, bool):
        raise BackendLoadError(
            f"{name} of {owner} does not say which version of the backend API it implements. Set "
            f"`api_version = {API_VERSION}` in the class, an int."
        )
    if version != API_VERSION:
        raise BackendLoadError(
            f"{name} of {owner} implements backend API {version!r}; this amp_core supports {API_VERSION}. "
            f"Install a version of the plugin that matches this amp_core."
        )
    wrong = wrong_attribute(backend)
    if wrong:
        raise TypeError(f"{name} of {owner}: {wrong}.")
