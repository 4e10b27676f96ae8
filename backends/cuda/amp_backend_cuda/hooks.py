"""Register the CUDA backend; the entry point ``cuda`` of group ``amp_core.backends`` names this module."""

from __future__ import annotations

from amp_backend_cuda.backend import CudaBackend
from amp_core.plugin import Registry, hookimpl


@hookimpl
def amp_register_backends(registry: Registry) -> None:
    """Register the CUDA backend."""
    registry.add(CudaBackend())
