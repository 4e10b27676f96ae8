"""Quantising tensors: shapes, groups, values that are not finite, counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_core import Delayed, Quantization, Quantized, Recipe, autocast, get_backend, quantize
from amp_core.formats import E2M1, E4M3, E5M2, ELEMENTS, SCALES, ElementFormat

from ..drawn import examples


def quantise(x: torch.Tensor, quantization: Quantization | None, dim: int = -1) -> Quantized:
    """Quantise by one role of any recipe."""
    assert quantization is not None
    unknown = None if quantization.found == "current" else torch.zeros((), device=x.device)
    return quantize(x, quantization, dim, seed=1, amax=unknown)


SHAPES = [(5, 100), (3, 7, 33), (40,), (0, 5), (5, 0), (130, 260), (1, 1)]


@pytest.mark.parametrize("name", Recipe.names())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dim", [-1, 0])
def test_every_recipe_takes_every_shape(name: str, shape: tuple[int, ...], dim: int) -> None:
    """Sizes that are no multiple of a block, or no elements, fail or come back changed."""
    recipe = Recipe.named(name)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for quantization in (recipe.input, recipe.weight, recipe.grad_output):
        quantized = quantise(x, quantization, dim)
        back = quantized.dequantize()
        assert back.shape == x.shape
        assert torch.equal(quantized.packed().dequantize(), back)
        if x.numel() > 1:
            assert (back - x).norm() < 0.3 * x.norm()


@pytest.mark.parametrize("name", Recipe.names())
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_are_counted_and_make_results_non_finite(name: str, bad: float) -> None:
    """An overflow vanishes in the largest value, or reports show it as elements that became 0."""
    x = torch.ones(32, 64)
    x[3, 5] = bad
    for quantization in (Recipe.named(name).input, Recipe.named(name).grad_output):
        quantized = quantise(x, quantization)
        assert quantized.counts.tolist() == [math.isinf(bad), math.isnan(bad), 0, 0]
        assert quantized.dequantize()[3, 5].isnan()
        assert quantized.packed().dequantize()[3, 5].isnan()


@pytest.mark.parametrize("name", Recipe.names())
def test_zeros_stay_zeros(name: str) -> None:
    """A block of zeros divides by zero."""
    for quantization in (Recipe.named(name).input, Recipe.named(name).weight):
        quantized = quantise(torch.zeros(3, 50), quantization)
        assert torch.equal(quantized.dequantize(), torch.zeros(3, 50))
        assert quantized.scale.isfinite().all()
        assert quantized.counts.tolist() == [0, 0, 0, 0]


def reference(x: torch.Tensor, quantization: Quantization) -> tuple[torch.Tensor, list[int]]:
    """Quantise and dequantise a matrix element by element, group by group; return it and the counts."""
    rows, columns = x.shape
    sizes: dict[Any, tuple[int, int]] = {"tensor": (rows, columns), "row": (1, columns)}
    if isinstance(quantization.granularity, int):
        sizes[quantization.granularity] = (1, quantization.granularity)
    height, width = sizes.get(quantization.granularity, quantization.granularity)  # type: ignore[arg-type]
    element, result, counts = quantization.element, torch.zeros(rows, columns), [0, 0]
    outer = f32(x.abs().max().item() / (448 * element.max)) or 1.0
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            group = x[top : top + height, left : left + width]
            amax = group.abs().max().item()
            encode, scale = scales(amax, element, quantization.scale, outer)
            scaled = group * encode
            values = element.round(scaled)
            largest = 2.0**element.max_exponent
            step = largest * 2.0**-element.mantissa_bits
            half_up = element.max + step / 2
            odd = (element.max / step) % 2 == 1
            counts[0] += int((scaled.abs() >= half_up).sum() if odd else (scaled.abs() > half_up).sum())
            counts[1] += int(((values == 0) & (group != 0)).sum())
            result[top : top + height, left : left + width] = values * scale
    return result, counts


def f32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


def scales(amax: float, element: ElementFormat, scale: str, outer: float) -> tuple[float, float]:
    """Return what elements are multiplied by, and the scale, in scalar arithmetic."""
    if scale == "e8m0":
        exponent = math.floor(math.log2(amax)) - element.max_exponent if amax else -127
        return 2.0**-exponent, 2.0**exponent
    if scale == "e8m0_up":
        exponent = math.ceil(math.log2(amax / element.max)) if amax else -127
        return 2.0**-exponent, 2.0**exponent
    if scale == "e4m3":
        inner = max(E4M3.round(torch.tensor(f32(f32(amax / element.max) / outer))).item(), 2.0**-9)
        return f32(f32(1 / outer) / inner), f32(inner * outer)
    encode = f32(element.max / amax) if amax else 1.0
    if scale == "power_of_two":
        encode = 2.0 ** math.floor(math.log2(encode))
    return encode, f32(1 / encode)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda x: x[:1].expand_as(x),
}


@given(
    element=st.sampled_from(list(ELEMENTS.values())),
    granularity=st.one_of(
        st.sampled_from(["tensor", "row"]),
        st.integers(1, 40),
        st.tuples(st.integers(1, 9), st.integers(1, 9)),
    ),
    scale=st.sampled_from(list(SCALES)),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 50)),
    layout=st.sampled_from(list(LAYOUTS)),
    spread=st.sampled_from([0.0, 1.0, 6.0]),
    seed=st.integers(0, 2**16),
)
@examples(100)
def test_groups_scales_and_counts_are_those_of_scalar_arithmetic(
    element: ElementFormat, granularity: Any, scale: str, shape: Any, layout: str, spread: float, seed: int
) -> None:
    """A group has the scale of another, padding is counted, or a layout changes the result."""
    if scale == "e4m3" and granularity == "tensor":
        granularity = "row"
    quantization = Quantization(element, granularity, scale)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(spread).exp()
    x[torch.rand(shape, generator=generator) < 0.1] = 0
    x = LAYOUTS[layout](x)
    quantized = quantize(x, quantization)
    expected, counts = reference(x, quantization)
    assert torch.equal(quantized.dequantize(), expected)
    assert quantized.counts.tolist() == [0, 0, *counts]
    other = quantize(x.t(), quantization, 0)
    assert torch.equal(other.dequantize().t(), expected)
    assert torch.equal(quantized.packed().dequantize(), expected)


def test_large_tensors_have_the_results_of_small_ones() -> None:
    """The CPU works in chunks, which lose a part or count it twice."""
    x = torch.randn(96, 2048, generator=torch.Generator().manual_seed(0))
    for recipe in map(Recipe.named, Recipe.names()):
        whole = quantise(x, recipe.grad_output)
        with patch("amp_core.formats.elementwise._CHUNK", 2**30):
            once = quantise(x, recipe.grad_output)
        assert torch.equal(whole.values, once.values)
        assert torch.equal(whole.counts, once.counts)


def test_stochastic_rounding_follows_from_the_seed() -> None:
    """A resumed run rounds otherwise, or all steps round alike and gradients gain a bias."""
    quantization = Quantization(E2M1, 16, rounding="stochastic")
    x = torch.rand(40, 33, generator=torch.Generator().manual_seed(0))
    first, again, other = (quantize(x, quantization, seed=s).dequantize() for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    mean = sum(quantize(x, quantization, seed=s).dequantize() for s in range(300)) / 300
    nearest = quantize(x, replace(quantization, rounding="nearest")).dequantize()
    assert (mean - x).abs().mean() < 0.15 * (nearest - x).abs().mean()
    with pytest.raises(ValueError, match="needs a seed"):
        quantize(x, quantization)


def test_a_single_number_is_rounded_stochastically() -> None:
    """The numbers of its elements get no shape, and the error names a view that no one asked for."""
    for element in ELEMENTS.values():
        quantization = Quantization(element, rounding="stochastic")
        for seed in range(8):
            amax = torch.tensor(element.max)
            one, row = (quantize(torch.full(n, 1.3), quantization, seed=seed, amax=amax) for n in ((), (1,)))
            assert one.values.shape == ()
            assert one.values == row.values
            assert one.packed().dequantize() == row.dequantize()


@pytest.mark.parametrize("size", [2, 16, 32])
def test_the_hadamard_transform_keeps_products_and_spreads_outliers(size: int) -> None:
    """A product of two transformed operands is another product, or an outlier still flushes its block."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 7, 64, generator=generator).unbind()
    quantization = Quantization(E5M2, 16, hadamard=size)
    qx, qw = quantize(x, quantization), quantize(w, quantization)
    rotated = qx.dequantize(rotated=True) @ qw.dequantize(rotated=True).t()
    assert quantize(x[:, :50], quantization).values.shape[-1] == 50 + -50 % size
    torch.testing.assert_close(rotated, qx.dequantize() @ qw.dequantize().t(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(qx.dequantize(), x, rtol=0.3, atol=0.3)
    outlier = torch.full((1, 32), 0.01)
    outlier[0, 5] = 10
    plain = quantize(outlier, Quantization(E2M1, 32))
    spread = quantize(outlier, Quantization(E2M1, 32, hadamard=32))
    assert plain.counts[3] == 31
    assert spread.counts[3] == 0


@pytest.mark.parametrize("size", [2, 16, 32])
def test_the_hadamard_transform_takes_large_values(size: int) -> None:
    """Sums of large finite values overflow on the way, and their block becomes NaN without a count."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).clamp_(-3, 3) * 2.0**124
    result = quantize(x, Quantization(E5M2, 16, hadamard=size))
    assert not result.counts.any()
    small = quantize(x * 2.0**-124, Quantization(E5M2, 16, hadamard=size))
    assert torch.equal(result.values, small.values)
    torch.testing.assert_close(result.dequantize() * 2.0**-124, small.dequantize())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_widened_first(dtype: torch.dtype) -> None:
    """A low-precision tensor has its scale computed in low precision."""
    x = torch.randn(5, 40).to(dtype)
    for name in Recipe.names():
        weight = Recipe.named(name).weight
        assert torch.equal(quantise(x, weight).values, quantise(x.float(), weight).values)


def test_what_cannot_be_quantised_is_refused() -> None:
    """A wrong argument fails deep inside, or not at all."""
    with pytest.raises(TypeError, match=r"torch\.int64"):
        quantize(torch.arange(3), Quantization(E4M3))
    with pytest.raises(ValueError, match="0-dim tensor has no 'row'"):
        quantize(torch.tensor(1.0), Quantization(E4M3, "row"))
    with pytest.raises(IndexError, match="dim=2"):
        quantize(torch.ones(2, 2), Quantization(E4M3), 2)
    with pytest.raises(ValueError, match=r"delayed scale: pass .*amax=history"):
        quantize(torch.ones(2), Quantization(E4M3, found=Delayed()))
    with pytest.raises(ValueError, match=r"amax has 3 elements; the scales are of shape \(\)"):
        quantize(torch.ones(2), Quantization(E4M3), amax=torch.ones(3))
    with pytest.raises(ValueError, match="amax has 2 elements; for e4m3 scales it is that of the tensor"):
        quantize(torch.ones(4, 32), Recipe.nvfp4().weight, amax=torch.ones(2))
    with pytest.raises(TypeError, match=r"Quantization of one role, such as .* got Recipe"):
        quantize(torch.ones(2), Recipe.mxfp8())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a tensor, got list"):
        quantize([1.0], Quantization(E4M3))  # type: ignore[arg-type]
    assert quantize(torch.tensor(3.0), Quantization(E4M3)).dequantize() == 3.0


def test_a_given_amax_has_the_shape_of_the_scales() -> None:
    """One of as many elements but another shape is taken in another order, so groups swap their scales."""
    x, how = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)), Quantization(E4M3, 32)
    own = quantize(x, how, 0)
    again = quantize(x, how, 0, amax=own.amax)
    assert torch.equal(again.values, own.values)
    for wrong in (own.amax.t(), own.amax.t().contiguous(), own.amax.flatten()):
        with pytest.raises(ValueError, match=r"the scales are of shape \(2, 96\), and amax is of \("):
            quantize(x, how, 0, amax=wrong)
    single = quantize(x, Quantization(E4M3))
    for one in (single.amax, single.amax.view(1), single.amax.view(1, 1)):
        assert torch.equal(quantize(x, Quantization(E4M3), amax=one).values, single.values)


@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("size", [2**40, 10**30])
def test_blocks_beyond_a_tensor(size: int, dim: int) -> None:
    """A block that is larger than the tensor is filled with zeros in memory, until there is none left."""
    x = torch.randn(40, 40, generator=torch.Generator().manual_seed(0))
    large_and_fitting: list[tuple[Any, Any]] = [(size, 40), ((size, 8), (40, 8)), ((2, size), (2, 40))]
    for large, fitting in large_and_fitting:
        wanted = quantize(x, Quantization(E4M3, fitting), dim)
        for kernel in (quantize, get_backend("cpu").kernels().quantize):
            found = kernel(x, Quantization(E4M3, large), dim)
            assert torch.equal(found.values, wanted.values)
            assert torch.equal(found.scale, wanted.scale)
            assert torch.equal(found.dequantize(), wanted.dequantize())


@pytest.mark.parametrize("kernel", [quantize, get_backend("cpu").kernels().quantize])
def test_a_given_amax_far_below_the_tensor(kernel: Any) -> None:
    """The scale of a group in e4m3 is NaN, and so are finite values, which no count shows."""
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(0)).abs() * 1e12 + 1e12
    quantized = kernel(x, Quantization(E2M1, 16, "e4m3"), amax=torch.tensor(1e-30))
    assert torch.equal(quantized.scale, torch.full((8, 8), 448.0))
    assert torch.equal(quantized.values, torch.full((8, 128), 6.0))
    assert quantized.counts.tolist() == [0, 0, 1024, 0]


@pytest.mark.parametrize("kernel", [quantize, get_backend("cpu").kernels().quantize])
@pytest.mark.parametrize("scale", [scale for scale in SCALES if scale != "e4m3"])
def test_the_largest_tensors_in_a_format_of_small_values(kernel: Any, scale: str) -> None:
    """Their scale is beyond float32: values become 0 or NaN, which no count of saturated elements shows."""
    mine = ElementFormat("e1m2", 1, 2, 1, 1.75, has_inf=False, has_nan=False, dtype=None)
    x = torch.linspace(-1.99, 1.99, 70 * 16).view(70, 16) * 2.0**127
    quantized = kernel(x, Quantization(mine, 8, scale))
    back = quantized.dequantize().double()
    limit = mine.max * quantized.scale.repeat_interleave(8, 1).double()
    near = x.double().clamp(-limit, limit)
    assert ((back - near).abs() <= limit / mine.max / 8).all()  # half of the format's step
    assert quantized.counts[2] == (x.abs() > limit * (1 + 1 / 14)).sum()
    assert quantized.packed().dequantize().equal(quantized.dequantize())


def test_memory_of_quantised_weights() -> None:
    """A cached weight takes more memory than the documentation says."""
    weight = torch.randn(512, 512)
    for name in Recipe.names():
        quantization = Recipe.named(name).weight
        assert quantization is not None
        limit = {8: 0.27, 6: 0.27, 4: 0.15}[quantization.element.bits]
        assert quantise(weight, quantization).packed().nbytes() <= limit * weight.nbytes


@pytest.mark.parametrize("name", Recipe.names())
def test_no_result_waits_for_the_device(name: str) -> None:
    """Quantising reads a value on the host: a GPU idles, and graphs cannot be captured."""
    with FakeTensorMode():  # refuses to give values
        for quantization in (Recipe.named(name).input, Recipe.named(name).weight):
            quantized = quantise(torch.randn(40, 70), quantization)
            assert quantized.dequantize().shape == (40, 70)
            quantized.packed()


@pytest.mark.parametrize("name", ["fp8_tensorwise", "mxfp8"])
def test_a_graph_and_a_region_change_no_bit(name: str) -> None:
    """A compiled model, or a region around it, rounds otherwise than eager code."""
    quantization = Recipe.named(name).grad_output
    assert quantization is not None

    def run(x: torch.Tensor) -> torch.Tensor:
        return quantize(x, quantization, seed=5).dequantize()

    x = torch.randn(33, 100, generator=torch.Generator().manual_seed(0))
    expected = run(x)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), expected)
    with autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run(x), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; there is none here")
@pytest.mark.parametrize("name", Recipe.names())
def test_a_gpu_has_the_bits_of_the_cpu(name: str) -> None:
    """A model that was rehearsed on a CPU is rounded otherwise on the GPU."""
    recipe = Recipe.named(name)
    x = torch.randn(70, 130, generator=torch.Generator().manual_seed(0))
    for quantization in (recipe.input, recipe.weight, recipe.grad_output):
        here, there = quantise(x, quantization).packed(), quantise(x.cuda(), quantization).packed()
        assert torch.equal(here.values.view(torch.uint8), there.values.view(torch.uint8).cpu())
        assert torch.equal(here.scale.float(), there.scale.float().cpu())
        assert torch.equal(here.counts, there.counts.cpu())


@pytest.mark.parametrize("name", Recipe.names())
def test_defaults_of_torch_change_nothing(name: str) -> None:
    """A constant is created in the default dtype or on the default device."""
    x = torch.randn(40, 70)
    for quantization in (Recipe.named(name).weight, Recipe.named(name).grad_output):
        expected = quantise(x, quantization)
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"), torch.inference_mode():
                other = quantise(x, quantization)
                back = other.packed().dequantize()
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(other.values, expected.values)
        assert torch.equal(other.counts, expected.counts)
        assert torch.equal(back, expected.dequantize())
