"""What `ScaledProducts` must do: products of quantised matrices, within the rounding of their sum."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from amp_core.formats import Quantized, Recipe, quantize
from amp_core.kernels import ScaledProducts
from amp_core.testing.suite import data
from amp_core.testing.suite.judge import Judge
from amp_core.testing.suite.threads import Judged, interleave

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
        given = [data.there(each.packed() if packed else each, self.device) for each in factors]
        result = self._multiplied(given[0], given[1], recipe.accumulate, what)
        left, right = (each.dequantize(torch.float64, rotated=True) for each in factors)
        right_answer, limit = left @ right, (2 * left.shape[-1] + 4) * 2.0**-24 * (left.abs() @ right.abs())
        assert result.shape == right_answer.shape, f"{what} has the shape {tuple(result.shape)}"
        found = data.plain(result).double()
        assert torch.equal(found.isnan(), right_answer.isnan()), f"{what} has NaN in other places"
        wrong = (found - right_answer).abs() > limit
        assert not bool(wrong.any()), f"{what} is wrong in {int(wrong.sum())} elements, by more than rounding"
        return result

    def _multiplied(
        self, a: Quantized | Tensor, b: Quantized | Tensor, accumulate: torch.dtype, what: str
    ) -> Tensor:
        """Multiply on the device; check what is promised of the call, and the kind of the result."""
        read = [*data.parts(a), *data.parts(b)]
        (result,) = self._call("multiply", lambda: [self._products.multiply(a, b, accumulate)], read, ())
        assert result.dtype is accumulate, f"{what} is {result.dtype}"
        return result  # type: ignore[no-any-return]

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
            for batched in (False, True):
                ask = partial(self._products.why_emulated, a, b, recipe.accumulate, batched=batched)
                reasons = [ask(), ask()]
                assert isinstance(reasons[0], str), f"the reason for {name} is {reasons[0]!r}"
                assert reasons[0] == reasons[1]
            whole = self._products.why_emulated(a, b, recipe.accumulate, batched=False)
            assert self._products.why_emulated(a, b, recipe.accumulate) == whole, (
                "batched= is not False by default"
            )

    def _judge_products_in_contexts(self) -> None:
        """Modes, defaults, other threads and the values of the last call change nothing."""
        a, b = (data.random(shape, torch.float32) for shape in ((5, 40), (40, 9)))
        contexts: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
            torch.enable_grad,
            torch.no_grad,
            torch.inference_mode,
            lambda: torch.device("meta"),
            partial(data.default_dtype, torch.float64),
        )
        for context, packed in itertools.product(contexts, (False, self.supports_float8)):
            with self._calls_in(context):
                self._judge_product("fp8_rowwise", "output", a, b, packed=packed)

        def judged(number: int) -> Judged:
            def run(context: Callable[[], AbstractContextManager[Any]]) -> None:
                judge = type(self)()
                judge._context = context
                rows = a[: number + 2] * (number + 1)
                judge._judge_product("fp8_rowwise", "output", rows, b, packed=self.supports_float8)

            return run

        interleave(judged, 10_000 if self.thorough else 6)
        self._judge_products_of_the_moment()

    def _judge_products_of_the_moment(self) -> None:
        """Operands lie where others lay; one of them may be a plain tensor, which no recipe quantises."""
        how, plain = Recipe.fp8_rowwise().input, torch.eye(32, device=self.device)
        assert how is not None
        here = data.there(quantize(torch.ones(32, 32), how), self.device)
        pairs: tuple[tuple[Quantized | Tensor, Quantized | Tensor], ...] = (
            (here, plain),
            (plain, replace(here, dim=0)),
        )
        for (a, b), value in itertools.product(pairs, (1.0, 2.0)):
            here.scale.data.copy_(scale := quantize(torch.full((32, 32), value), how).scale)
            result = self._multiplied(a, b, torch.float32, "a product with a plain tensor")
            right = here.values.float().cpu() * (scale if a is here else scale.mT)
            close = torch.allclose(data.plain(result), right, rtol=1e-5)
            assert close, f"a product of {value} with a plain tensor is wrong"
