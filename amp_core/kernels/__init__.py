"""Cast and gradient kernels: the contract, and the portable ones that every backend starts from."""

from __future__ import annotations

import functools

from amp_core.kernels.interface import GradStats, Kernels, ScaleTensors
from amp_core.kernels.portable import Portable


@functools.cache
def portable_kernels(*, has_float64: bool) -> Portable:
    """Return the portable kernels for devices with or without float64, the same object each time."""
    return Portable(has_float64=has_float64)


PORTABLE = portable_kernels(has_float64=True)

__all__ = ["PORTABLE", "GradStats", "Kernels", "Portable", "ScaleTensors", "portable_kernels"]
