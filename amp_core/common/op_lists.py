"""Where policies get the op lists of a device: policies are data, and cannot import what loads devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Lists = Mapping[str, str]
"""Rule to op names, separated by white space."""

_sources: list[Callable[[str], Lists]] = []


def set_source(source: Callable[[str], Lists]) -> None:
    """Let `source` return the op lists of a device type; `amp_core` itself calls this."""
    _sources[:] = [source]


def op_lists(device_type: str) -> Lists:
    """Return the op lists of the native autocast kernels of `device_type`; empty if nobody has any."""
    return _sources[0](device_type)
