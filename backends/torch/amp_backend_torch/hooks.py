"""Registers, as fallbacks, the devices that torch serves itself; named by the entry point ``torch``."""

from __future__ import annotations

from amp_backend_torch.backend import MaiaBackend, MpsBackend, MtiaBackend
from amp_core.plugin import Registry, hookimpl


@hookimpl
def amp_register_backends(registry: Registry) -> None:
    """Hand the fallbacks to amp-core; a package that serves one of these devices comes first."""
    for backend in (MpsBackend("mps"), MtiaBackend("mtia"), MaiaBackend("maia")):
        registry.add(backend, fallback=True)
