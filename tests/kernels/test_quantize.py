"""The compiled kernel that quantises, against PyTorch operations, bit for bit."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_backend_cpu import kernels as cpu
from amp_backend_cpu import quantizing
from amp_core import Quantization, Quantized, Recipe, autocast, get_backend, quantize
from amp_core.formats import ELEMENTS, SCALES, ElementFormat
from amp_core.formats.passes import PortablePasses

from ..drawn import examples
from ..formats.test_elements import OWN

COMPILED = cpu.load()
pytestmark = [
    pytest.mark.usefixtures("instruction_set"),
    pytest.mark.skipif(
        not isinstance(COMPILED, cpu.Compiled), reason=f"no compiled kernels: {COMPILED.reason}"
    ),
]
SHAPES = [(40,), (1, 1), (5, 100), (3, 7, 33), (2, 2, 3, 19), (3, 5000), (1100, 3)]
LAYOUTS = ["contiguous", "transposed", "strided", "offset"]
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-42]


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "transposed" and x.dim() > 1:
        return x.mT.contiguous().mT
    if layout == "strided":
        return x.repeat_interleave(2, -1)[..., ::2]
    return torch.cat([x.new_ones(1), x.flatten()])[1:].view(x.shape) if layout == "offset" else x


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    ours, theirs = ours.float(), theirs.float()
    assert torch.equal(ours.isnan(), theirs.isnan())
    numbers = ~ours.isnan()
    assert torch.equal(ours[numbers].view(torch.int32), theirs[numbers].view(torch.int32))


def judge(x: torch.Tensor, how: Quantization, dim: int = -1, **options: Any) -> Quantized:
    """Compare what the compiled kernel and PyTorch operations make of `x`."""
    theirs = quantize(x, how, dim, **options)
    for packed in (False, True):
        ours = COMPILED.quantize(x, how, dim, packed=packed, **options)
        expected = theirs.packed() if packed else theirs
        assert ours.is_packed is packed
        for name in ("values", "scale", "amax"):
            assert_same(getattr(ours, name), getattr(expected, name))
        assert (ours.tensor_scale is None) == (expected.tensor_scale is None)
        assert torch.equal(ours.counts, expected.counts)
        assert_same(ours.dequantize(), expected.dequantize())
    return theirs


@given(
    element=st.sampled_from(list(ELEMENTS.values())),
    granularity=st.one_of(
        st.sampled_from(["tensor", "row", 16, 32, (16, 16)]),
        st.integers(1, 40),
        st.tuples(st.integers(1, 9), st.integers(1, 9)),
    ),
    scale=st.sampled_from(list(SCALES)),
    stochastic=st.booleans(),
    shape=st.sampled_from(SHAPES),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    dim=st.sampled_from([-1, -2, 0]),
    spread=st.sampled_from([0.0, 1.0, 20.0]),
    special=st.sampled_from([None, *SPECIAL]),
    given_amax=st.sampled_from([None, 0.0, 1e-30, 3.5, 1e30]),
    seed=st.integers(0, 2**16),
)
@examples(40)
def test_every_bit_is_that_of_torch(
    element: ElementFormat,
    granularity: Any,
    scale: str,
    stochastic: bool,
    shape: tuple[int, ...],
    layout: str,
    dtype: torch.dtype,
    dim: int,
    spread: float,
    special: float | None,
    given_amax: float | None,
    seed: int,
) -> None:
    """A tile has the scale of another, a tie goes the other way, or a count is off."""
    if scale == "e4m3" and granularity == "tensor":
        granularity = "row"
    how = Quantization(element, granularity, scale, rounding="stochastic" if stochastic else "nearest")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(spread).exp()
    x = x.to(dtype)
    x[torch.rand(shape, generator=generator) < 0.1] = 0
    if special is not None:
        x.view(-1)[seed % x.numel()] = special
    alone = granularity == "tensor" or scale == "e4m3"
    amax = torch.tensor(given_amax) if given_amax is not None and alone else None
    judge(laid_out(x, layout), how, max(dim, -x.dim()), seed=seed, amax=amax)


@pytest.mark.parametrize("name", Recipe.names())
def test_every_recipe_of_large_tensors(name: str) -> None:
    """Threads, or lines of a large tensor, lose a part or count it twice."""
    x = torch.randn(70, 1100, generator=torch.Generator().manual_seed(0))
    recipe, unknown = Recipe.named(name), torch.zeros(()) if name == "fp8_delayed" else None
    for how in (recipe.input, recipe.weight, recipe.grad_output):
        assert how is not None
        judge(x, how, seed=3, amax=unknown)
        judge(x.t(), how, -2, seed=torch.tensor(2**40 + 3), amax=unknown)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("element", ELEMENTS.values(), ids=list(ELEMENTS))
def test_every_value_of_a_half(dtype: torch.dtype, element: ElementFormat) -> None:
    """A tie, a subnormal value or the largest one is rounded otherwise."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    judge(every[every.isfinite()], Quantization(element), amax=torch.tensor(element.max))
    judge(every, Quantization(element), amax=torch.tensor(element.max / 3))


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("element", ELEMENTS.values(), ids=list(ELEMENTS))
def test_the_largest_value_of_rows_with_their_own_scales(element: ElementFormat, kind: str) -> None:
    """A largest magnitude that its scale takes an ulp too far has the next code, or none is cut off."""
    x = torch.randn(2000, 160, generator=torch.Generator().manual_seed(0))
    x[::3] = x[::3].clamp(-1, 1) * torch.rand(667, 1, generator=torch.Generator().manual_seed(1))
    x[7, 5], x[8, 6], x[9, 7] = math.nan, math.inf, 1e-42
    x[10], x[11] = 0, 1e-42
    quantized = judge(x, Quantization(element, "row", kind))
    assert quantized.counts[:2].tolist() == [1, 1]
    assert (quantized.counts[2] > 0) == (kind == "e8m0")  # e4m3: the tensor's own scale is NaN


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the memory map of a process is Linux's")
def test_a_large_result_lies_in_huge_pages() -> None:
    """Faults of small pages take longer than rounding does."""
    values = COMPILED.quantize(torch.randn(3000, 3000), Quantization(ELEMENTS["e4m3"])).values
    middle = values.data_ptr() + values.nbytes // 2
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)[
        1:
    ]:
        start, end = (int(address, 16) for address in mapping.split(" ", 1)[0].split("-"))
        if start <= middle < end:
            assert "hg" in mapping.rsplit("VmFlags:", 1)[1].split()
            return
    pytest.fail("no mapping holds the result")


def test_what_it_does_not_take_is_left_to_torch() -> None:
    """A tensor of another kind is read as raw memory, or an error loses its words."""
    how = Quantization(ELEMENTS["e4m3"], "row")
    judge(torch.randn(4, 5, dtype=torch.float64), how)
    judge(torch.randn(4, 5, 6), how, 0)
    judge(torch.empty(0, 5), how)
    for element in ELEMENTS.values():
        judge(torch.tensor(3.0), Quantization(element))
    with pytest.raises(IndexError, match="dim=2"):
        COMPILED.quantize(torch.ones(2, 2), how, 2)
    with pytest.raises(TypeError, match=r"torch\.int64"):
        COMPILED.quantize(torch.arange(3), how)


def test_a_region_quantises_with_the_kernel_of_its_device() -> None:
    """The emulation takes the portable form, many times slower."""
    policy = get_backend("cpu").op_policy().override({"linear": Recipe.mxfp8()})
    layer = torch.nn.Linear(64, 32)
    used = patch.object(quantizing.CompiledPasses, "round", side_effect=RuntimeError("used"))
    region = autocast("cpu", dtype=torch.bfloat16, policy=policy)
    with used, region, pytest.raises(RuntimeError, match="used"):
        layer(torch.randn(8, 64))


@pytest.mark.parametrize("kind", SCALES)
def test_the_scale_of_every_magnitude(kind: str) -> None:
    """A scale of a subnormal, the largest or a borderline magnitude has another bit, or another code."""
    bits = torch.arange(0, 0x7F800000, 29_989, dtype=torch.int32)
    bits = torch.cat(
        [bits, torch.arange(256, dtype=torch.int32) << 23, torch.tensor([1, 0x7F7FFFFF, 0x7FC00000])]
    )
    found = bits.to(torch.int32).view(torch.float32)
    own = torch.where(torch.arange(len(found)) % 7 == 0, torch.inf, found)
    tensors = (0.0, 1e-42, 1.0, 3e38, math.inf, math.nan) if kind == "e4m3" else (1.0,)
    compiled = quantizing.CompiledPasses(cpu._library.load())
    for element in (ELEMENTS["e4m3"], ELEMENTS["e2m1"]):
        for whole in tensors:
            for packed in (False, True):
                arguments = own, found, element, kind, torch.tensor(whole)
                ours = compiled.scales(*arguments, packed=packed)
                theirs = PortablePasses().scales(*arguments, packed=packed)
                assert_same(ours.encode, theirs.encode)
                assert_same(ours.scale, theirs.scale)
                if theirs.tensor_scale is not None:
                    assert ours.tensor_scale is not None
                    assert_same(ours.tensor_scale, theirs.tensor_scale)


@pytest.mark.parametrize("element", OWN, ids=[element.name for element in OWN])
def test_own_formats(element: ElementFormat) -> None:
    """An own format is packed in codes of a published one: a negative value that becomes 0 is NaN."""
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    x[1, ::3] = -1e-9
    x[2, 1] = -0.0
    for granularity in ("tensor", 16):
        judge(x, Quantization(element, granularity))
        judge(x.to(torch.bfloat16).t(), Quantization(element, granularity, rounding="stochastic"), -2, seed=3)
