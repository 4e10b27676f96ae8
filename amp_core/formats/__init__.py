"""Formats of 8, 6 and 4 bits with scales: recipes as data, and quantising with PyTorch operations."""

from __future__ import annotations

from amp_core.formats.elements import E2M1, E2M3, E3M2, E4M3, E5M2, ELEMENTS, ElementFormat
from amp_core.formats.history import AmaxHistory
from amp_core.formats.quantization import Delayed, Quantization
from amp_core.formats.quantize import COUNTS, Quantized, quantize
from amp_core.formats.recipe import Recipe
from amp_core.formats.scales import SCALES
from amp_core.formats.transformer_engine import from_transformer_engine

__all__ = [
    "COUNTS",
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "ELEMENTS",
    "SCALES",
    "AmaxHistory",
    "Delayed",
    "ElementFormat",
    "Quantization",
    "Quantized",
    "Recipe",
    "from_transformer_engine",
    "quantize",
]
