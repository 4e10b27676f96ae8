"""Cast and gradient kernels: the contract, and the portable ones that every backend starts from."""

from __future__ import annotations

from amp_core.kernels.interface import GradStats, Kernels, ScaleTensors
from amp_core.kernels.portable import Portable

PORTABLE = Portable()

__all__ = ["PORTABLE", "GradStats", "Kernels", "Portable", "ScaleTensors"]
