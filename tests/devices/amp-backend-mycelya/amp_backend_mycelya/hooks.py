"""What the entry point ``mycelya`` of group ``amp_core.backends`` names."""

from __future__ import annotations

from mycelya_torch import RemoteMachine

from amp_backend_mycelya.backend import MycelyaBackend
from amp_core.plugin import Registry, hookimpl


@hookimpl
def amp_register_backends(registry: Registry) -> None:
    """Start a machine in this process, which is device 0, and hand the backend to amp-core."""
    RemoteMachine("mock").device("cpu")
    registry.add(MycelyaBackend())
