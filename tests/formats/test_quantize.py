"""Quantising tensors: shapes, groups, values that are not finite, counts."""

from __future__ import annotations

import math

import pytest
import torch

from amp_core import Recipe, quantize

SHAPES = [(5, 100), (3, 7, 33), (40,), (0, 5), (5, 0), (130, 260), (1, 1)]


@pytest.mark.parametrize("name", Recipe.names())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dim", [-1, 0])
def test_every_recipe_takes_every_shape(name: str, shape: tuple[int, ...], dim: int) -> None:
    """Sizes that are no multiple of a block, or no elements, fail or come back changed."""
    recipe = Recipe.named(name)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for quantization in (recipe.input, recipe.weight, recipe.grad_output):
        assert quantization is not None
        quantized = quantize(x, quantization, dim, seed=1)
        back = quantized.dequantize()
        assert back.shape == x.shape
        assert torch.equal(quantized.packed().dequantize(), back)
        if x.numel() > 1:
            assert (back - x).norm() < 0.3 * x.norm()


@pytest.mark.parametrize("name", Recipe.names())
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_are_counted_and_make_results_non_finite(name: str, bad: float) -> None:
    """An overflow vanishes in the largest value, and the scaler takes the step."""
    x = torch.ones(32, 64)
    x[3, 5] = bad
    for quantization in (Recipe.named(name).input, Recipe.named(name).grad_output):
        assert quantization is not None
        quantized = quantize(x, quantization, seed=1)
        assert quantized.counts[:2].tolist() == [math.isinf(bad), math.isnan(bad)]
        assert quantized.dequantize()[3, 5].isnan()
        assert quantized.packed().dequantize()[3, 5].isnan()


@pytest.mark.parametrize("name", Recipe.names())
def test_zeros_stay_zeros(name: str) -> None:
    """A block of zeros divides by zero."""
    for quantization in (Recipe.named(name).input, Recipe.named(name).weight):
        assert quantization is not None
        quantized = quantize(torch.zeros(3, 50), quantization)
        assert torch.equal(quantized.dequantize(), torch.zeros(3, 50))
        assert quantized.scale.isfinite().all()
        assert quantized.counts.tolist() == [0, 0, 0, 0]
