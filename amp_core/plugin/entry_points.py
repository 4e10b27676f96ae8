"""The entry points that declare backends; the only place that reads distribution metadata."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from types import ModuleType
from typing import NamedTuple

from amp_core.plugin.registry import Owner

ENTRY_POINT_GROUP = "amp_core.backends"


class Candidate(NamedTuple):
    """One declared, not yet imported, plugin."""

    device_type: str
    distribution: str
    version: str
    entry_point: metadata.EntryPoint

    def load(self) -> ModuleType:
        """Import the plugin."""
        module = self.entry_point.load()
        if not isinstance(module, ModuleType):
            raise TypeError(
                f"the entry point must name a module with hooks, such as 'my_package.hooks', "
                f"but {self.entry_point.value!r} is a {type(module).__name__}"
            )
        return module

    def is_built_in(self, built_in: Mapping[str, str]) -> bool:
        """Whether this is our own declaration of a backend that the manager knows anyway."""
        return built_in.get(self.device_type) == self.entry_point.value

    def owner(self, module: ModuleType | None = None) -> Owner:
        """Say who brings this plugin."""
        path = os.path.dirname(getattr(module, "__file__", None) or "")
        return Owner(self.device_type, self.distribution, self.version, path)


def candidates() -> list[Candidate]:
    """Return what is declared, sorted by name and distribution; each value of a name once.

    Stale metadata (an ``egg-info`` beside an installed distribution) lists an entry point twice.
    """
    found = {(ep.name, ep.value): Candidate(ep.name, *_distribution(ep), ep) for ep in _declared()}
    return sorted(found.values(), key=lambda c: (c.device_type, c.distribution, c.entry_point.value))


def _declared() -> Iterator[metadata.EntryPoint]:
    try:
        yield from metadata.entry_points(group=ENTRY_POINT_GROUP)
    except Exception:
        # The metadata of some distribution cannot be read: that must not hide those of the others.
        for distribution in metadata.distributions():
            with suppress(Exception):
                yield from [ep for ep in distribution.entry_points if ep.group == ENTRY_POINT_GROUP]


def own_version() -> str:
    """Return the version of amp-core, empty where its metadata is lost: that must not stop a backend."""
    try:
        return metadata.version("amp-core")
    except metadata.PackageNotFoundError:
        return ""


def _distribution(ep: metadata.EntryPoint) -> tuple[str, str]:
    try:
        # Half an uninstall leaves entry points without the file that names their distribution.
        return (ep.dist.name or "", ep.dist.version or "") if ep.dist is not None else ("", "")
    except Exception:
        return ("", "")
