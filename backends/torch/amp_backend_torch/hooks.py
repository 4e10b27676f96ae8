"""Register fallbacks for devices that torch supports itself; the entry point ``torch`` names this module."""

from __future__ import annotations

from amp_backend_torch.backend import MaiaBackend, MpsBackend, MtiaBackend
from amp_core.plugin import Registry, hookimpl


@hookimpl
def amp_register_backends(registry: Registry) -> None:
    """Register the fallbacks; another package's backend for these devices takes precedence."""
    for backend in (MpsBackend("mps"), MtiaBackend("mtia"), MaiaBackend("maia")):
        registry.add(backend, fallback=True)
