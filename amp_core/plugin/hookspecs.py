"""The hook through which a plugin hands its backends to amp-core."""

from __future__ import annotations

import pluggy

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
