"""Register the XPU backend; the entry point ``xpu`` of group ``amp_core.backends`` names this module."""

from __future__ import annotations

from amp_backend_xpu.backend import XpuBackend
from amp_core.plugin import Registry, hookimpl


@hookimpl
def amp_register_backends(registry: Registry) -> None:
    """Register the XPU backend."""
    registry.add(XpuBackend())
