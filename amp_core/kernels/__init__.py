"""Cast and gradient kernels: the interface, and the portable implementation for all devices."""

from __future__ import annotations

import functools

from amp_core.kernels.interface import GradStats, Kernels, ScaleTensors
from amp_core.kernels.memory import are_plain
from amp_core.kernels.portable import Portable
from amp_core.kernels.scaled import ScaledProducts


@functools.cache
def portable_kernels(*, has_float64: bool) -> Portable:
    """Return the cached portable kernels for devices with or without float64."""
    return Portable(has_float64=has_float64)


PORTABLE = portable_kernels(has_float64=True)
EMULATED = ScaledProducts()

__all__ = [
    "EMULATED",
    "PORTABLE",
    "GradStats",
    "Kernels",
    "Portable",
    "ScaleTensors",
    "ScaledProducts",
    "are_plain",
    "portable_kernels",
]
