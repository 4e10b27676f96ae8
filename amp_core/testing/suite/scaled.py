"""What `ScaledProducts` must do: products of quantised matrices, within the rounding of their sum."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from amp_core.formats import Quantized, Recipe, quantize
from amp_core.kernels import ScaledProducts
from amp_core.testing.suite import data
from amp_core.testing.suite.judge import Judge

Product = Literal["output", "grad_input", "grad_weight"]
_SHAPES = ((5, 40, 9), (33, 16, 16), (1, 7, 1), (3, 130, 20))
"""Rows, terms and columns."""


class ScaledJudge(Judge):
    """Products of quantised matrices agree with float64, whether the device has them or emulates."""

    @property
    def _products(self) -> ScaledProducts:
        return self.backend.scaled_products()

    def _judge_product(self, name: str, product: Product, a: Tensor, b: Tensor, *, packed: bool) -> Tensor:
        """Multiply `a` and `b`, on the host, as `product` of a recipe; compare with float64."""
        recipe = Recipe.named(name)
        hows = recipe.operands(product)
        factors = list[Quantized]()
        for x, how, dim in zip((a, b), hows, (-1, -2), strict=True):
            assert how is not None, f"{name} leaves an operand of {product} as it is"
            delayed = None if how.found == "current" else torch.tensor(4.0)
            factors.append(quantize(x, how, dim, seed=3, amax=delayed))
        what = f"{product} of {name}, {tuple(a.shape)} by {tuple(b.shape)}, {packed=}"
        with self._context():
            given = [self._there(each.packed() if packed else each) for each in factors]
            result = self._products.multiply(given[0], given[1], recipe.accumulate)
        assert type(result) is Tensor, f"{what} is a {type(result).__name__}"
        assert result.dtype is recipe.accumulate, f"{what} is {result.dtype}"
        assert result.device == given[0].values.device, f"{what} is on {result.device}"
        left, right = (each.dequantize(torch.float64, rotated=True) for each in factors)
        right_answer, limit = left @ right, (2 * left.shape[-1] + 4) * 2.0**-24 * (left.abs() @ right.abs())
        assert result.shape == right_answer.shape, f"{what} has the shape {tuple(result.shape)}"
        found = data.plain(result).double()
        assert torch.equal(found.isnan(), right_answer.isnan()), f"{what} has NaN in other places"
        wrong = (found - right_answer).abs() > limit
        assert not bool(wrong.any()), f"{what} is wrong in {int(wrong.sum())} elements, by more than rounding"
        return result

    def _there(self, quantized: Quantized) -> Quantized:
        outer = quantized.tensor_scale
        return replace(
            quantized,
            values=quantized.values.to(self.device),
            scale=quantized.scale.to(self.device),
            tensor_scale=None if outer is None else outer.to(self.device),
        )

    def _judge_products_of_every_recipe(self) -> None:
        """Odd sizes, packed operands: no padding is summed, and no scale multiplies another block."""
        seeds = range(12 if self.thorough else 1)
        for number, name in enumerate(Recipe.names()):
            products: tuple[Product, ...] = ("output", "grad_input", "grad_weight")
            for turn, product in enumerate(products):
                for seed in seeds:
                    m, k, n = _SHAPES[(number + turn + seed) % len(_SHAPES)]
                    a, b = (data.random(s, torch.float32, seed) for s in ((m, k), (k, n)))
                    packed = self.supports_float8 and (turn + seed) % 2 == 0
                    self._judge_product(name, product, a, b, packed=packed)

    def _judge_products_of_batches_and_of_nothing(self) -> None:
        """Batches, as in attention, and experts without tokens: shapes that libraries refuse or get wrong."""
        shapes = (((3, 5, 32), (3, 32, 6)), ((0, 32), (32, 4)), ((4, 0), (0, 4)), ((4, 32), (32, 0)))
        for name in ("fp8_tensorwise", "fp8_rowwise", "mxfp8"):
            for left, right in shapes:
                a, b = (data.random(shape, torch.float32) for shape in (left, right))
                self._judge_product(name, "output", a, b, packed=False)

    def _judge_products_with_inf(self) -> None:
        """A loss scaler could not see an inf that a product turned into a number."""
        for name in ("fp8_tensorwise", "fp8_rowwise", "mxfp8", "nvfp4"):
            a, b = (data.random(shape, torch.float32) for shape in ((6, 64), (64, 6)))
            a[2, 40] = math.inf
            result = self._judge_product(name, "output", a, b, packed=self.supports_float8)
            assert bool(result[2].isnan().all())

    def _judge_reasons(self) -> None:
        """`amp backends` cannot say why a format is emulated, or the answer changes between two calls."""
        for name in Recipe.names():
            recipe = Recipe.named(name)
            a, b = recipe.operands("output")
            assert a is not None
            assert b is not None
            reasons = [self._products.why_emulated(a, b, recipe.accumulate) for _ in range(2)]
            assert isinstance(reasons[0], str), f"the reason for {name} is {reasons[0]!r}"
            assert reasons[0] == reasons[1]
