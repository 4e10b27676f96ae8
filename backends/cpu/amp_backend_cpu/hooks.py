"""Register the CPU backend; the entry point ``cpu`` of group ``amp_core.backends`` names this module."""

from __future__ import annotations

from amp_backend_cpu.backend import CpuBackend
from amp_core.plugin import Registry, hookimpl


@hookimpl
def amp_register_backends(registry: Registry) -> None:
    """Register the CPU backend."""
    registry.add(CpuBackend())
