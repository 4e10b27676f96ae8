"""The hooks that amp-core calls in plugins. Names and arguments only; `manager` calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from amp_core.plugin.registry import Registry

NAME = "amp_core"
_spec = pluggy.HookspecMarker(NAME)


@_spec(historic=True)
def amp_register_backends(registry: Registry) -> None:
    """Hand your backends to amp-core.

    Called once, when the plugin is loaded: on the first request for a device type that its entry
    point is named after, or when all backends are listed.

    Args:
        registry: call ``registry.add(backend)`` for each device type you serve.
    """


__all__ = ["amp_register_backends"]
