"""Where policies get a device's op lists, since the policy layer cannot import the one that loads devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Lists = Mapping[str, str]
"""Maps rules to op names separated by whitespace."""

_sources: list[Callable[[str], Lists]] = []


def set_source(source: Callable[[str], Lists]) -> None:
    """Use `source` to get the op lists of a device type; called by `amp_core` itself."""
    _sources[:] = [source]


def op_lists(device_type: str) -> Lists:
    """Return the op lists of `device_type`'s native autocast kernels; empty if there are none.

    Raises:
        BackendNotFoundError: no backend serves the device type.
    """
    return _sources[0](device_type)
