"""What the entry point ``openreg`` of group ``amp_core.backends`` names."""

from __future__ import annotations

import torch_openreg  # noqa: F401  # makes "openreg" known to torch

from amp_backend_openreg.backend import OpenregBackend
from amp_core.plugin import Registry, hookimpl


@hookimpl
def amp_register_backends(registry: Registry) -> None:
    """Hand the backend to amp-core."""
    registry.add(OpenregBackend())
