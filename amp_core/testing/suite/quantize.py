"""What `Kernels.quantize` must do: each format, scale, tie and count has one right answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from amp_core._torch.tracing import fake_tensor_mode
from amp_core.formats import ELEMENTS, SCALES, Quantization, Quantized, Recipe, quantize
from amp_core.regions.region import autocast
from amp_core.testing.suite import data
from amp_core.testing.suite.comparisons import difference
from amp_core.testing.suite.scaled import ScaledJudge
from amp_core.testing.suite.tensors import READ_ONLY, Memory, host, specs
from amp_core.testing.suite.threads import Judged, interleave

_FIELDS = ("values", "scale", "tensor_scale", "amax", "counts")
_SHAPES = ((3, 50), (2, 17, 33), (70,), (0, 5), (150, 9))


class QuantizeConformance(ScaledJudge):
    """Quantised tensors equal those of `amp_core.quantize` on the host, bit for bit; products agree."""

    AREA = "quantize"

    def _judge_quantize(
        self, x: Tensor, how: Quantization, dim: int = -1, *, packed: bool = False, **options: Any
    ) -> Quantized:
        """Quantise `x`, a tensor on the host, on the device; compare with the reference."""
        here = torch.empty_like(x, device=self.device).copy_(x)
        given = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in options.items()}
        packed = packed and self.supports_float8
        memory = Memory([here, *(v for v in given.values() if isinstance(v, Tensor))])
        with self._context():
            result = self.kernels.quantize(here, how, dim, packed=packed, **given)
        memory.check()
        expected = quantize(x, how, dim, **options)
        expected = expected.packed() if packed else expected
        # The report cuts a line, so that the long text of `how` comes last.
        what = f"quantize of {x.dtype} of shape {tuple(x.shape)} along {dim}, {options}, {packed=}"
        assert isinstance(result, Quantized), f"{what} returned a {type(result).__name__}, not a Quantized"
        kind = (result.dim, result.shape, result.is_packed, result.quantization)
        right = (dim, x.shape, packed, how)
        assert kind == right, f"{what}: (dim, shape, is_packed, quantization) are {kind}, not {right}"
        for name in _FIELDS:
            ours, right = getattr(result, name), getattr(expected, name)
            assert (ours is None) == (right is None), f"{what}: {name} is {ours}, not {right}, by {how}"
            if right is not None:
                assert ours.device.type == self.device_type, f"{what}: {name} is on {ours.device}"
                here = data.plain(ours)
                same = data.same_values(here, right)
                assert same, f"{what}: {name} has {difference(here, right)}, by {how}"
        return result

    def _every_quantization(self) -> Iterator[Quantization]:
        recipes = map(Recipe.named, Recipe.names())
        roles = itertools.chain.from_iterable((r.input, r.weight, r.grad_output) for r in recipes)
        yield from dict.fromkeys(how for how in roles if how is not None)

    def test_quantize_follows_every_recipe(self) -> None:
        """Odd sizes, dimensions and layouts: no tile may take another one's scale, or count its padding."""
        self.requires("supports_bit_views")
        dtypes = itertools.cycle(self.dtypes())
        cases = itertools.cycle(itertools.product(_SHAPES, (-1, -2), (False, True), (False, True)))
        for number, how in enumerate(self._every_quantization()):
            amax = {} if how.found == "current" else {"amax": torch.tensor(float(number % 2) * 3)}
            for shape, dim, transposed, packed in itertools.islice(cases, 80 if self.thorough else 3):
                x = data.random(shape, next(dtypes), number) * 3
                x = x.mT.contiguous().mT if transposed and x.dim() > 1 else x
                self._judge_quantize(x, how, max(dim, -x.dim()), packed=packed, seed=number, **amax)
        self._judge_quantize_of_many_kinds()
        self._judge_quantize_along_every_dimension()
        self._judge_quantize_from_a_given_amax()
        self._judge_products_of_every_recipe()

    def _judge_quantize_of_many_kinds(self) -> None:
        """More dimensions, unusual values and a given amax: what recipes rarely meet."""
        how = Quantization(ELEMENTS["e4m3"], "row")
        x = data.random((2, 3, 2, 2, 5), torch.float32)
        for dim in (0, 1, 3, -5):
            self._judge_quantize(x, how, dim)
        self._judge_quantize(x * 1e-32, how)
        if self.supports_float64:  # numbers that float32 would round to ties, to inf, and to 0
            wide = torch.tensor(
                [448.0, 17 + 2.0**-40, 19 - 2.0**-40, 1e300, -1e39, 1e-300], dtype=torch.float64
            )
            for values in (wide[:3], -wide[[0, 1, 5]], wide):
                self._judge_quantize(values, how)
        self._judge_quantize(data.random((257, 260), torch.float32), Quantization(ELEMENTS["e4m3"]))
        self._judge_quantize(data.random((1100, 5), torch.float32), how)
        if self.keeps_subnormals:  # in float16, small gradients are
            for dtype in {*self.dtypes()} - {torch.float64}:  # which is rounded to float32
                tiny = torch.finfo(dtype).smallest_normal
                self._judge_quantize(torch.tensor([[tiny / 2, -tiny / 4, 0.0, tiny / 8]], dtype=dtype), how)
        self._judge_quantize_of_every_layout(how)

    def _judge_quantize_of_every_layout(self, how: Quantization) -> None:
        """Activations are parts of graphs, expanded or transposed, and of another kind in inference mode."""
        modes = itertools.cycle((False, True))
        for spec in specs([torch.float32], (*self._layouts(), *READ_ONLY), [(7, 6), (3, 4, 5)]):
            with torch.inference_mode(mode := next(modes)):
                here = spec.build(self.device)
                found, right = self.kernels.quantize(here, how), quantize(host(here), how)
            self._assert_own([found.values, found.scale], mode, here.device)
            for ours, wanted in ((found.values, right.values), (found.scale, right.scale)):
                assert data.same_values(data.plain(ours), wanted), f"of another layout: {spec.layout}"

    def _judge_quantize_along_every_dimension(self) -> None:
        """Blocks and tiles of a convolution's weight or of a batch may lie along any dimension."""
        hows = [Quantization(ELEMENTS["e4m3"], granularity) for granularity in ("tensor", "row", 16, (2, 16))]
        hows += [Quantization(ELEMENTS["e2m1"], 16, "e4m3", rounding="stochastic")]
        hows += [Quantization(ELEMENTS["e2m1"], 16, "e8m0", hadamard=16)]
        for number, (how, dim) in enumerate(itertools.product(hows, range(3))):
            shape = ((3, 6, 35), (18, 2, 20))[number % 2]
            x = data.random(shape, self.dtypes()[number % len(self.dtypes())], number)
            self._judge_quantize(x, how, dim, packed=number % 3 == 0, seed=number)

    def _judge_quantize_from_a_given_amax(self) -> None:
        """Only what is above zero counts, group by group; what is not finite in the tensor counts always."""
        x = data.random((6, 200), torch.float32)
        x[1, 3], x[2, 40] = math.inf, math.nan
        given = torch.tensor([3.0, 0.0, math.nan, -1.0, 1e-30, math.inf, 0.01])
        for amax in given:
            self._judge_quantize(x[3:], Quantization(ELEMENTS["e4m3"]), amax=amax)
            self._judge_quantize(x, Quantization(ELEMENTS["e2m1"], 16, "e4m3"), amax=amax)
        for granularity, scale in itertools.product(("row", 16, (2, 16)), ("float32", "e8m0")):
            how = Quantization(ELEMENTS["e4m3"], granularity, scale)  # type: ignore[arg-type]
            scales = quantize(x, how).scale
            amax = given.repeat(12)[: scales.numel()].view(scales.shape)
            self._judge_quantize(x, how, packed=scale == "e8m0", amax=amax)
        self._judge_quantize(x[1:], Quantization(ELEMENTS["e4m3"]), amax=torch.tensor(3.0))

    def test_quantize_rounds_ties_to_even_and_saturates(self) -> None:
        """Every value of each format, the middle of every two neighbours, and values beyond the largest."""
        self.requires("supports_bit_views")
        for element in ELEMENTS.values():
            values = torch.arange(64) * element.smallest_subnormal
            binades = 2.0 ** torch.arange(1 - element.bias, element.max_exponent + 3)
            steps = 1 + torch.arange(2 << element.mantissa_bits) / (2 << element.mantissa_bits)
            values = torch.cat(
                [values, values + element.smallest_subnormal / 2, (binades[:, None] * steps).flatten()]
            )
            values = torch.cat([values, values.nextafter(torch.zeros(())), values * (1 + 2.0**-20)])
            x = torch.cat([values, -values])
            for amax in (element.max, element.max / 3):
                how = Quantization(element)
                self._judge_quantize(x, how, packed=amax == element.max, amax=torch.tensor(amax))

    def test_quantize_of_zeros_inf_and_nan(self) -> None:
        """A group of zeros must not divide by zero, and the largest value of a format hides no overflow."""
        self.requires("supports_bit_views")
        x = data.random((6, 64), torch.float32)
        x[0] = 0
        x[1, 40:] = -0.0
        x[2, 3], x[2, 40], x[4, 5] = math.inf, math.nan, -math.inf
        for scale, granularity in itertools.product(SCALES, ("tensor", "row", 16, (2, 16))):
            if (scale, granularity) == ("e4m3", "tensor"):
                continue
            element = ELEMENTS["e2m1" if scale == "e4m3" else "e4m3"]
            how = Quantization(element, granularity, scale)  # type: ignore[arg-type]
            result = self._judge_quantize(x, how, packed=granularity == 16)
            assert result.counts[:2].tolist() == [2, 1]
            self._judge_quantize(torch.zeros(3, 40), how)
        self._judge_products_of_batches_and_of_nothing()
        self._judge_products_with_inf()

    def test_quantize_repeats_itself(self) -> None:
        """The same seed rounds alike on every device and in every run; another one does not."""
        self.requires("supports_bit_views")
        x = data.random((5, 48), torch.float32)
        for element in ELEMENTS.values():
            how = Quantization(element, 16, "e8m0", rounding="stochastic")
            first, again, other = (self._judge_quantize(x, how, seed=seed) for seed in (7, 7, 2**40 + 8))
            assert data.same_bits(first.values, again.values)
            assert not data.same_bits(first.values, other.values)
        for seed in (0, -1, -7, -(2**40), 2**63 - 1, 2**63, 2**64 + 7, -(2**64), 10**30):
            self._judge_quantize(x, how, seed=seed)
        for bits in (7, -7, 2**40 + 8, -(2**63), 2**63 - 1):
            self._judge_quantize(x, how, seed=torch.tensor(bits))
        self._judge_the_moment_of_quantizing()
        self._judge_quantize_in_contexts(x)
        self._judge_products_in_contexts()

    def _judge_quantize_in_contexts(self, x: Tensor) -> None:
        """Modes, other threads and tracing change nothing: a graph asks for shapes and dtypes alone."""
        how = Quantization(ELEMENTS["e2m1"], 16, "e4m3")
        contexts: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
            torch.inference_mode,
            torch.enable_grad,
            lambda: autocast(self.device_type),
            lambda: torch.device("meta"),
        )
        for number, context in enumerate(contexts):
            with self._calls_in(context):
                self._judge_quantize(x, how, packed=number % 2 == 0)

        def judged(number: int) -> Judged:
            def run(context: Callable[[], AbstractContextManager[Any]]) -> None:
                judge = type(self)()
                judge._context = context
                judge._judge_quantize(x[: number + 2] * (number + 1), how)

            return run

        interleave(judged, 10_000 if self.thorough else 6)
        real = torch.empty_like(x, device=self.device)
        with fake_tensor_mode() as mode:
            fake = mode.from_tensor(real)
            result, right = self.kernels.quantize(fake, how), quantize(fake, how)
        for name in _FIELDS:
            ours, expected = getattr(result, name), getattr(right, name)
            assert isinstance(ours, type(fake)), f"{name} of a fake tensor is not fake: {ours}"
            assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype), name

    def _judge_the_moment_of_quantizing(self) -> None:
        """A result kept for a tensor is stale once an optimizer has written it through `data`."""
        how, here = Quantization(ELEMENTS["e4m3"]), torch.zeros(4, 32, device=self.device)
        top, random = data.scalar(1.0, self.device), replace(how, rounding="stochastic")
        bits = torch.tensor(0).to(self.device)
        for seed in range(2):
            here.data.copy_(values := data.random((4, 32), torch.float32, seed))
            top.data.fill_(3.0 + seed)
            for given, amax in ((None, None), (top, torch.tensor(3.0 + seed))):
                found, right = self.kernels.quantize(here, how, amax=given), quantize(values, how, amax=amax)
                assert data.same_values(data.plain(found.values), right.values), f"in call {seed}"
            bits.data.fill_(seed + 5)
            found = self.kernels.quantize(here, random, seed=bits)
            right = quantize(values, random, seed=torch.tensor(seed + 5))
            assert data.same_values(data.plain(found.values), right.values), f"by the seed of call {seed}"

    def test_quantize_refuses_what_it_cannot_take(self) -> None:
        """A wrong argument would read memory out of bounds, or be taken for another argument."""
        ones, how = torch.ones(4, 4, device=self.device), Quantization(ELEMENTS["e4m3"], "row")
        with self._refused("quantize of int32", error=TypeError):
            self.kernels.quantize(ones.to(torch.int32), how)
        with self._refused("quantize of a matrix along dimension 2", error=IndexError):
            self.kernels.quantize(ones, how, 2)
        with self._refused("quantize of a tensor without dimensions in rows"):
            self.kernels.quantize(ones[0, 0], how)
        with self._refused("stochastic quantize without a seed"):
            self.kernels.quantize(ones, Quantization(ELEMENTS["e4m3"], "row", rounding="stochastic"))
        self._judge_reasons()
