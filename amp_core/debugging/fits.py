"""How well tensors fit a format: what rounding to it changes, and how large they are beside its range."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from amp_core._torch.tensors import numbers
from amp_core.casts.shards import whole
from amp_core.formats import Quantization, Quantized, Recipe, quantize
from amp_core.formats.hadamard import rotate


@dataclass(frozen=True)
class Fit:
    """How well tensors fit a format.

    Attributes:
        elements: the number of their elements.
        saturated: how many were reduced to the largest value of the format.
        flushed: how many, other than 0, became 0.
        changed: the sum of the squares of what rounding changed, of finite elements.
        size: the sum of the squares of finite elements.
        largest: the largest finite magnitude in units of its scale, over the largest value of the format. It
            saturates if this is clearly above 1.
        smallest: the least magnitude other than 0 in units of its scale, over the smallest value of the
            format; below 0.5 it is flushed. inf if there is none.
    """

    elements: int = 0
    saturated: int = 0
    flushed: int = 0
    changed: float = 0.0
    size: float = 0.0
    largest: float = 0.0
    smallest: float = math.inf

    @property
    def error(self) -> float:
        """The relative error that rounding adds to the tensors."""
        return math.sqrt(self.changed / self.size) if self.size else 0.0

    def __add__(self, other: Fit) -> Fit:
        return Fit(
            self.elements + other.elements,
            self.saturated + other.saturated,
            self.flushed + other.flushed,
            self.changed + other.changed,
            self.size + other.size,
            max(self.largest, other.largest),
            min(self.smallest, other.smallest),
        )


@torch.no_grad()
def fit_of(tensor: Tensor, quantized: Quantized) -> Fit:
    """Return how well `tensor` fits the format that it was rounded to; waits for the device."""
    _, _, saturated, flushed = numbers(quantized.counts)
    exact, rounded = tensor.detach().float(), quantized.dequantize()
    finite = exact.isfinite() & rounded.isfinite()
    changed, size = (_sum_of_squares(torch.where(finite, x, 0.0)) for x in (rounded - exact, exact))
    magnitudes = _in_units_of_the_scale(exact, quantized)
    element = quantized.quantization.element
    return Fit(
        tensor.numel(),
        saturated,
        flushed,
        changed,
        size,
        float(magnitudes.amax()) / element.max if magnitudes.numel() else 0.0,
        float(magnitudes.amin()) / element.smallest_subnormal if magnitudes.numel() else math.inf,
    )


def _sum_of_squares(values: Tensor) -> float:
    """Return the sum as a Python float: float32 may hold no square of the values."""
    if not values.any():
        return 0.0
    largest = values.abs().amax()
    return float((values / largest).square().sum()) * float(largest) ** 2


def _in_units_of_the_scale(exact: Tensor, quantized: Quantized) -> Tensor:
    """Return the finite magnitudes other than 0."""
    hadamard = quantized.quantization.hadamard
    if hadamard is not None:
        exact = rotate(exact, hadamard, quantized.dim)
    ones = replace(quantized, values=torch.ones_like(exact), is_packed=False)
    magnitudes = (exact / ones.dequantize(rotated=True)).abs()
    return magnitudes[(magnitudes > 0) & magnitudes.isfinite()]


def fits_of_parameters(
    roots: Iterable[nn.Module], recipe: Recipe, without: Collection[str]
) -> dict[str, Fit]:
    """Return how well parameters fit the format that `recipe` gives weights, by name.

    Args:
        roots: the modules.
        recipe: the recipe.
        without: the names of modules whose weights were quantised.
    """
    how = recipe.weight or recipe.input
    if how is not None:
        how = replace(how, found="current")  # these parameters have no history
    named = (pair for root in roots for pair in root.named_parameters())
    return {
        name: _fit(whole(parameter.detach()), how)
        for name, parameter in named
        if how is not None
        and name.rpartition(".")[0] not in without
        and parameter.is_floating_point()
        and parameter.dim()
        and parameter.layout is torch.strided
        and not parameter.is_meta
    }


def _fit(tensor: Tensor, how: Quantization) -> Fit:
    return fit_of(tensor, quantize(tensor, how, seed=0))
