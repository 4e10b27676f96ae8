"""What the entry point ``npy`` of group ``amp_core.backends`` names."""

from __future__ import annotations

from amp_backend_example import device
from amp_backend_example.backend import NpyBackend
from amp_core.plugin import Registry, hookimpl


@hookimpl
def amp_register_backends(registry: Registry) -> None:
    """Make the device known to torch and its backend to amp-core."""
    device.register()
    registry.add(NpyBackend())
