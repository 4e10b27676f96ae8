"""Load and look up backends. Nothing here runs when a region is entered or a step is taken."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from types import ModuleType

import pluggy

from amp_core._torch.autocast import autocast_known, is_device_type, privateuse1_name
from amp_core._torch.dispatcher import autocast_device_types
from amp_core.common import environment as _env
from amp_core.common.call_site import callers, level_outside
from amp_core.common.locks import new_lock
from amp_core.errors import (
    BackendConflictError,
    BackendDisabledError,
    BackendLoadError,
    BackendNotFoundError,
    PluginWarning,
)
from amp_core.plugin import entry_points, hookspecs
from amp_core.plugin.entry_points import Candidate
from amp_core.plugin.generic import TorchBackend
from amp_core.plugin.hook_errors import has_methods, hooks_named
from amp_core.plugin.interface import Backend
from amp_core.plugin.registry import Owner, Registry
from amp_core.plugin.status import BackendStatus, Failure, status_of, status_of_failure, unknown_text
from amp_core.plugin.surroundings import restored

_UNNAMED = "privateuseone"


class Manager:
    """Loads plugins through pluggy and keeps their backends in a registry, under one lock."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.listens = False
        self._lock = new_lock()
        self._generic: dict[str, TorchBackend] = {}
        """By the device types that no plugin serves; a fallback takes precedence."""
        self._added: dict[str, list[Backend]] = {}
        """The backends that each plugin registered in code has added, by the plugin's name."""
        self._loaded: dict[str, Failure | None] = {}
        """Entry points tried so far, as ``name=value``, each with its failure or None."""
        self._pluggy = pluggy.PluginManager(hookspecs.NAME)
        self._pluggy.add_hookspecs(hookspecs)
        self._pluggy.hook.amp_register_backends.call_historic(kwargs={"registry": self.registry})

    @cached_property
    def built_in(self) -> dict[str, Candidate]:
        """The plugins that ship with amp-core, by name."""
        return entry_points.built_in()

    # Backends.

    def get(self, device_type: str) -> Backend:
        """Return the backend of `device_type`, loading its plugin on the first request."""
        if not isinstance(device_type, str):
            raise TypeError(
                f"A backend is found by the type of its device, such as 'cuda', not by {device_type!r}."
            )
        # torch still accepts "privateuseone" after the device has been renamed.
        name = privateuse1_name() if device_type == _UNNAMED else device_type
        backend = self.registry.get(name) or self._unserved(name)
        if backend is None:
            with self._locked() as may_load:
                backend = self._find(name) if may_load else self._torch_backend(name)
        return backend

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Take the lock; yield whether plugins may be loaded.

        A thread that imports a plugin by itself does not wait for another one: that may wait for this import.
        """
        held = self._lock.acquire(blocking=False) or (not self._imports_plugin() and self._lock.acquire())
        try:
            yield held
        finally:
            if held:
                self._lock.release()

    def _imports_plugin(self) -> bool:
        packages = {_package(c.entry_point.value) for c in entry_points.third_party(self.built_in)}
        bodies = (frame.f_globals for frame in callers() if frame.f_code.co_name == "<module>")
        return any(_package(str(names.get("__name__"))) in packages for names in bodies)

    def _find(self, device_type: str) -> Backend:
        disabled = _env.disabled_backends()
        if device_type in disabled:
            raise BackendDisabledError(
                f"The backend for {device_type!r} is switched off by "
                f"{_env.DISABLE_BACKENDS}={','.join(sorted(disabled))}. Remove it there to use the device."
            )
        if device_type in self.built_in:
            self._load_built_in([device_type])
        if self.registry.get(device_type) is None and _env.plugin_autoload():
            declared = entry_points.third_party(self.built_in)
            # A plugin may serve types that its entry point does not name, so if none matches, load all.
            self._load([c for c in declared if c.name == device_type] or declared)
        backend = self.registry.get(device_type)
        if backend is not None:
            return backend
        for failure in self._failures():
            if failure.owner.plugin == device_type:
                raise BackendLoadError(
                    f"The backend for {device_type!r} is installed but failed to load: {failure}. Provide "
                    f"what it lacks, install another version, or report it to its authors."
                ) from failure.error
        return self._torch_backend(device_type)

    def _torch_backend(self, device_type: str) -> Backend:
        """Return the generic backend for a device type that torch can autocast but no plugin serves."""
        self._load_built_in()
        if not _torch_serves(device_type):
            known = {*self.registry, *autocast_device_types()} - _env.disabled_backends()
            raise BackendNotFoundError(unknown_text(device_type, known, self.registry.aliases()))
        generic = self._generic.setdefault(device_type, TorchBackend(device_type))
        return self._unserved(device_type) or generic

    def _unserved(self, device_type: str) -> Backend | None:
        """Return the backend of a device type that no plugin was found to serve; None if not looked for."""
        generic, fallback = self._generic.get(device_type), self.registry.fallback(device_type)
        return generic if generic is None or fallback is None else fallback[0]

    def discover(self) -> None:
        """Load every enabled backend that is built in or declared by an entry point."""
        with self._locked() as may_load:
            self._load_built_in()
            if may_load and _env.plugin_autoload():
                self._load(entry_points.third_party(self.built_in))

    def status(self) -> dict[str, BackendStatus]:
        """Describe every device type that is built in, declared, or known to torch."""
        with self._locked():
            self.discover()
            result = {name: status_of(*self.registry[name]) for name in self.registry}
            failures = self._failures()
        for failure in failures:
            name = failure.owner.plugin
            if name in result:
                served = result[name]
                result[name] = replace(served, reason=f"{served.reason}; left out: {failure}")
            else:
                result[name] = status_of_failure(failure)
        for name in _env.disabled_backends() - result.keys():
            result[name] = BackendStatus("disabled", f"{_env.DISABLE_BACKENDS} names it", name)
        # The slot for out-of-tree devices is unused while it has its default name.
        for name in {*autocast_device_types(), privateuse1_name()} - {_UNNAMED} - result.keys():
            _, owner = self.registry.fallback(name) or (None, Owner("torch"))
            result[name] = status_of(self._torch_backend(name), owner)
        return dict(sorted(result.items()))

    # Loading.

    def _load_built_in(self, names: Iterable[str] = ()) -> None:
        for name in set(names or self.built_in) - _env.disabled_backends():
            candidate = self.built_in[name]
            if name not in self._loaded:
                module = candidate.load()  # not in a try block: errors in our own code must surface
                self._register(module, candidate.owner(module))
                self._loaded[name] = None

    def _load(self, declared: Sequence[Candidate]) -> None:
        disabled = _env.disabled_backends()
        wanted = [c for c in declared if c.name not in disabled]
        if wanted:
            self._load_built_in()  # first, so that no plugin can replace them
        for candidate in wanted:
            key = f"{candidate.name}={candidate.entry_point.value}"
            if key not in self._loaded:
                self._load_once(candidate, key)
            _raise_if_strict(self._loaded[key])

    def _load_once(self, candidate: Candidate, key: str) -> None:
        self._loaded[key] = None
        try:
            with restored() as changed:
                self._loaded[key] = self._failure_of(candidate)
        except BaseException:  # interrupted, so allow another attempt
            del self._loaded[key]
            raise
        _warn(self._loaded[key], set(self.registry))
        if changed:
            _warn_of_changes(candidate.owner(), changed)

    def _failure_of(self, candidate: Candidate) -> Failure | None:
        """Load `candidate`; if that fails, undo it and return the failure."""
        stage, owner, module = "requirements", candidate.owner(), None
        try:
            candidate.check_requirements()
            stage = "import"
            module = candidate.load()
            if self._pluggy.is_registered(module):
                return None  # another entry point names the same module
            stage, owner = "register", candidate.owner(module)
            self._register(module, owner)
            with hooks_named():
                self._pluggy.check_pending()
            self._check_added(candidate, owner)
        except BaseException as error:
            self.registry.drop(owner)
            if module is not None:
                self._forget(module)
            # A plugin that calls sys.exit() or pytest.importorskip() on import must not end the program.
            if isinstance(error, KeyboardInterrupt):
                raise
            return Failure(owner, stage, error)
        self.registry.drop(owner, _env.disabled_backends())
        return None

    def _check_added(self, candidate: Candidate, owner: Owner) -> None:
        added = [backend.device_type for backend, whose in self.registry.added() if whose == owner]
        if not added:
            raise BackendLoadError(
                f"its hooks registered no backend; {candidate.entry_point.value} must define a function "
                f"amp_register_backends(registry), marked with amp_core.plugin.hookimpl, that calls "
                f"registry.add()"
            )
        if candidate.name not in added and _torch_serves(candidate.name):
            raise BackendLoadError(
                f"its entry point is named {candidate.name!r}, but it registered a backend for "
                f"{', '.join(map(repr, added))} only; correct device_type, or the name of the entry point"
            )
        free = {name for name in added if self.registry.fallback(name) is not None}
        for device_type in (self.built_in.keys() & set(added)) - free:  # possible only while it is disabled
            raise BackendConflictError(
                f"{owner} wants to serve device type {device_type!r}, which is amp-core's own. "
                f"Call amp_core.plugin.replace_backend() to replace a built-in backend."
            )

    def _register(self, module: ModuleType, owner: Owner) -> None:
        with self.registry.claimed(owner), hooks_named():
            self._pluggy.register(module, name=f"{owner.plugin}:{module.__name__}")
        self._update_listens()

    def _failures(self) -> list[Failure]:
        return [failure for failure in self._loaded.values() if failure is not None]

    # Plugins without an entry point, and events.

    def add(self, plugin: object, name: str | None) -> None:
        """Register a plugin of any kind; roll back if a hook is unknown or has a wrong argument."""
        if not isinstance(name, str | None):
            raise TypeError(f"name= of a plugin must be a text, not {name!r}.")
        with self._locked():
            if self._pluggy.is_registered(plugin):
                raise ValueError(f"{plugin!r} is already registered with amp-core.")
            if isinstance(plugin, type) and has_methods(plugin):
                raise ValueError(
                    f"{plugin!r} is a class whose hooks are methods. Register an instance of it."
                )
            if name is not None and self._pluggy.has_plugin(name):
                raise ValueError(f"Another plugin is registered as {name!r}. Pass another name.")
            self._load_built_in()  # first: its backends would come in the way, its fallbacks take precedence
            before = self.registry.added()
            try:
                with hooks_named():
                    registered = self._pluggy.register(plugin, name)
                    self._pluggy.check_pending()
                if not self._pluggy.get_hookcallers(plugin):
                    known = ", ".join(sorted(hookspecs.__all__))
                    raise ValueError(
                        f"{plugin!r} has no hook of amp-core's. A hook is a function or method named "
                        f"{known}, marked with amp_core.plugin.hookimpl."
                    )
            except BaseException:
                self.registry.withdraw(self._added_since(before))
                self._forget(plugin)
                raise
            self._added[str(registered)] = self._added_since(before)
            self._update_listens()

    def _added_since(self, before: Sequence[tuple[Backend, Owner]]) -> list[Backend]:
        known = {id(backend) for backend, _ in before}
        return [backend for backend, _ in self.registry.added() if id(backend) not in known]

    def remove(self, plugin: object) -> None:
        """Undo `add`."""
        with self._locked():
            if not self._pluggy.is_registered(plugin):
                raise ValueError(f"{plugin!r} is not registered with amp-core, so it cannot be unregistered.")
            name = str(self._pluggy.get_name(plugin))
            if name not in self._added:
                raise ValueError(
                    f"{plugin!r} was found by its entry point, not registered in code, so it cannot be "
                    f"unregistered. Set {_env.DISABLE_BACKENDS} to its device types before amp-core loads it."
                )
            self.registry.withdraw(self._added.pop(name))
            self._forget(plugin)

    def _forget(self, plugin: object) -> None:
        # Before 1.7, pluggy keeps a plugin registered whose registration failed.
        if self._pluggy.is_registered(plugin):
            self._pluggy.unregister(plugin)
        self._update_listens()

    def call(self, hook: str, **event: object) -> None:
        """Call `hook` in every plugin that has it."""
        getattr(self._pluggy.hook, hook)(**event)

    def _update_listens(self) -> None:
        self.listens = any(getattr(self._pluggy.hook, hook).get_hookimpls() for hook in hookspecs.EVENTS)


def _package(module: str) -> str:
    return module.partition(":")[0].partition(".")[0]


def _torch_serves(device_type: str) -> bool:
    """Whether a device type gets the generic backend, with torch's rules, if no plugin serves it."""
    return is_device_type(device_type) and autocast_known(device_type)


def _raise_if_strict(failure: Failure | None) -> None:
    if _env.strict_plugins() and failure is not None:
        raise BackendLoadError(f"{failure}.") from failure.error


def _warn_of_changes(owner: Owner, changed: list[str]) -> None:
    warnings.warn(
        f"{owner} changed {', '.join(changed)} while it was loaded; amp-core put it back. Report this to the "
        f"plugin's authors, or import its package yourself before the first region.",
        PluginWarning,
        stacklevel=level_outside(),
    )


def _warn(failure: Failure | None, served: Set[str]) -> None:
    if not _env.strict_plugins() and failure is not None:
        name = failure.owner.plugin
        # To disable a served device type would disable the backend that the plugin conflicts with, too.
        silence = "" if name in served else f"{_env.DISABLE_BACKENDS}={name} to silence this warning, or "
        warnings.warn(
            f"{failure}. The plugin was skipped; other backends are not affected. Set {silence}"
            f"{_env.STRICT_PLUGINS}=1 to raise the error.",
            PluginWarning,
            stacklevel=level_outside(),
        )
