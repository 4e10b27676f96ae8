"""Find the packages that provide backends; the only module that reads distribution metadata."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from amp_core.common.versions import installed_version
from amp_core.errors import BackendLoadError
from amp_core.plugin.registry import Owner

ENTRY_POINT_GROUP = "amp_core.backends"
_OWN = "amp-core"
_PREFIX = "amp_backend_"


class Candidate(NamedTuple):
    """A declared plugin that has not been imported yet."""

    name: str
    distribution: str
    version: str
    entry_point: metadata.EntryPoint

    def load(self) -> ModuleType:
        """Import the plugin's module."""
        module = self.entry_point.load()
        if not isinstance(module, ModuleType):
            raise TypeError(
                f"the entry point must name a module with hooks, such as 'my_package.hooks', "
                f"but {self.entry_point.value!r} is {_kind_of(module)}"
            )
        return module

    def owner(self, module: ModuleType | None = None) -> Owner:
        """Return the `Owner` of the backends that this plugin registers."""
        path = os.path.dirname(getattr(module, "__file__", None) or "")
        return Owner(self.name, self.distribution, self.version, path)

    def check_requirements(self) -> None:
        """Raise `BackendLoadError` if the plugin's distribution requires another version of amp-core."""
        here = installed_version(_OWN)
        for text in (self.entry_point.dist and self.entry_point.dist.requires) or ():
            if here and _excludes(text, here):
                raise BackendLoadError(
                    f"it requires {text!r}, but amp-core {here} is installed (pip checks this unless it is "
                    f"given --no-deps). Install a version of {self.distribution} for amp-core {here}"
                )


def _kind_of(named: object) -> str:
    return "a class" if isinstance(named, type) else f"a {type(named).__name__}"


def third_party(ours: dict[str, Candidate]) -> list[Candidate]:
    """Return the plugins that other distributions declare, sorted by name and distribution.

    Duplicates are removed: stale metadata (an ``egg-info`` next to an installed distribution) can list an
    entry point twice.
    """
    own = {c.entry_point.value for c in ours.values()}
    return [c for c in _declared() if c.distribution != _OWN and c.entry_point.value not in own]


def built_in() -> dict[str, Candidate]:
    """Return the plugins that ship with amp-core, by the device type each is named after.

    In a source tree they are ``backends/*/amp_backend_*``, whatever the metadata says, which may be stale or
    missing. In an installation they sit next to the package ``amp_core``; its metadata, if any, says which.
    """
    root = Path(__file__).resolve().parents[2]
    folders = sorted(root.glob(f"backends/*/{_PREFIX}*/hooks.py"))
    modules = {path.parent.name.removeprefix(_PREFIX): path.parent for path in folders}
    if not modules:
        modules = dict(_installed(root))
    return {name: _own_candidate(name, folder) for name, folder in modules.items()}


def _installed(root: Path) -> Iterator[tuple[str, Path]]:
    declared = _declared()
    own = {c.name for c in declared if c.distribution == _OWN}
    theirs = {c.entry_point.value.partition(".")[0] for c in declared if c.distribution != _OWN}
    packages = {path.parent.name for path in root.glob(f"{_PREFIX}*/hooks.py")}
    if not packages:  # a zip file, or an application that was built from modules, has no folders
        packages = {found.name for found in pkgutil.iter_modules([str(root)]) if found.ispkg}
    for package in sorted(packages):
        name = package.removeprefix(_PREFIX)
        # If our own metadata is missing, treat every package that no other distribution claims as ours.
        if package.startswith(_PREFIX) and (name in own or (not own and package not in theirs)):
            yield name, root / package


def _own_candidate(name: str, folder: Path) -> Candidate:
    if importlib.util.find_spec(folder.name) is None:
        sys.path.append(str(folder.parent))  # editable install that predates this folder
    point = metadata.EntryPoint(name, f"{folder.name}.hooks", ENTRY_POINT_GROUP)
    return Candidate(name, _OWN, installed_version(_OWN), point)


def _declared() -> list[Candidate]:
    unique = {(ep.name, ep.value): Candidate(ep.name, *_distribution(ep), ep) for ep in _entry_points()}
    return sorted(unique.values(), key=lambda c: (c.name, c.distribution, c.entry_point.value))


def _entry_points() -> Iterator[metadata.EntryPoint]:
    try:
        yield from metadata.entry_points(group=ENTRY_POINT_GROUP)
    except Exception:
        # One distribution with unreadable metadata must not hide the others.
        for distribution in metadata.distributions():
            with suppress(Exception):
                yield from [ep for ep in distribution.entry_points if ep.group == ENTRY_POINT_GROUP]


def _distribution(ep: metadata.EntryPoint) -> tuple[str, str]:
    try:
        # An incomplete uninstall leaves entry points without the file that names their distribution.
        return (ep.dist.name or "", ep.dist.version or "") if ep.dist is not None else ("", "")
    except Exception:
        return ("", "")


def _excludes(text: str, version: str) -> bool:
    """Return whether `text` is a requirement that counts here, and `version` of amp-core does not meet it."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    try:
        requirement = Requirement(text)
    except InvalidRequirement:  # pip would reject it
        return False
    if canonicalize_name(requirement.name) != _OWN:
        return False
    counts = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    return counts and not requirement.specifier.contains(version, prereleases=True)
