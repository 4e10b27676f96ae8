"""Rounding to the element formats, against exact arithmetic on fractions."""

from __future__ import annotations

import copy
import math
import pickle
from bisect import bisect_left
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amp_core import Quantization, Recipe, quantize
from amp_core.formats import E2M1, ELEMENTS, SCALES, ElementFormat
from amp_core.formats.packing import pack, unpack
from amp_core.kernels.torch_scaled import kind_of

from ..drawn import examples

OWN = (
    ElementFormat("e3m4", 3, 4, 3, 31.0, has_inf=False, has_nan=False, dtype=None),
    ElementFormat("e4m3fnuz", 4, 3, 8, 240.0, has_inf=False, has_nan=True, dtype=torch.float8_e4m3fnuz),
    ElementFormat("e4m2", 4, 2, 7, 448.0, has_inf=False, has_nan=False, dtype=None),
    ElementFormat("e1m2", 1, 2, 1, 1.75, has_inf=False, has_nan=False, dtype=None),
    ElementFormat("e4m3wide", 4, 3, 7, 448.0, has_inf=False, has_nan=True, dtype=torch.float16),
    ElementFormat("e3m0", 3, 0, 3, 16.0, has_inf=False, has_nan=False, dtype=None),
)
each = pytest.mark.parametrize("element", ELEMENTS.values(), ids=list(ELEMENTS))


def table(element: ElementFormat) -> list[Fraction]:
    """Return every finite value from 0 up, in the order of its code, as the OCP specifications define it."""
    values = []
    for code in range(2 ** (element.bits - 1)):
        exponent, mantissa = divmod(code, 2**element.mantissa_bits)
        fraction = Fraction(mantissa, 2**element.mantissa_bits)
        if exponent == 0:
            values.append(fraction * Fraction(2) ** (1 - element.bias))
        else:
            values.append((1 + fraction) * Fraction(2) ** (exponent - element.bias))
    special = {"e4m3": 1, "e5m2": 4}.get(element.name, 0)  # NaN; inf and three NaN
    return values[: len(values) - special]


def nearest(value: float, values: list[Fraction]) -> float:
    """Round to nearest, ties to the even code, beyond the largest value to it."""
    exact = abs(Fraction(value))
    above = min(bisect_left(values, exact), len(values) - 1)
    below = max(above - 1, 0)
    down, up = exact - values[below], values[above] - exact
    code = below if down < up or (down == up and below % 2 == 0) else above
    if exact >= values[above]:
        code = above
    return math.copysign(float(values[code]), value)


def next_float32(x: Tensor, towards: float) -> Tensor:
    return torch.nextafter(x, torch.tensor(towards))


def interesting(element: ElementFormat) -> Tensor:
    """Every value, every midpoint, their neighbours in float32, and what lies beyond, of both signs."""
    values = torch.tensor([float(v) for v in table(element)])
    beyond = torch.tensor([element.max * f for f in (1.02, 1.03125, 1.04, 1.1, 1.17, 1.2, 2.0, 1e20)])
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, beyond])
    tiny = torch.tensor([1e-45, 1e-38, element.smallest_subnormal / 4])
    points = torch.cat([points, next_float32(points, math.inf), next_float32(points, -math.inf), tiny])
    return torch.cat([points, -points])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@each
def test_the_numbers_of_a_format_follow_from_its_table(element: ElementFormat) -> None:
    """A constant is wrong, and with it every scale."""
    values = table(element)
    assert values[-1] == Fraction(element.max)
    assert values[1] == Fraction(element.smallest_subnormal)
    assert values[2**element.mantissa_bits] == Fraction(element.smallest_normal)
    assert Fraction(2) ** element.max_exponent <= values[-1] < Fraction(2) ** (element.max_exponent + 1)
    if element.bits == 8:
        assert element.dtype is not None
        assert torch.finfo(element.dtype).max == element.max


@each
def test_rounding_is_to_nearest_even_everywhere(element: ElementFormat) -> None:
    """One value, tie or neighbour rounds to another value than the specification's."""
    x = interesting(element)
    values = table(element)
    expected = torch.tensor([nearest(v, values) for v in x.tolist()])
    assert same_bits(element.round(x), expected)


@each
@examples()
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_any_float32_rounds_as_exact_arithmetic(element: ElementFormat, value: float) -> None:
    """A value that no table of ours has rounds wrongly."""
    expected = torch.tensor([nearest(value, table(element))])
    assert same_bits(element.round(torch.tensor([value])), expected)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_fp8_rounds_as_torch_casts(name: str) -> None:
    """Our values are not those of torch's dtype, where torch does not saturate."""
    element = ELEMENTS[name]
    x = interesting(element)
    x = x[x.abs() <= element.max]
    assert element.dtype is not None
    assert same_bits(element.round(x), x.to(element.dtype).float())


@each
def test_nan_and_inf_stay_visible(element: ElementFormat) -> None:
    """An overflow becomes the largest value, as in torch's cast, and no loss scaler sees it."""
    rounded = element.round(torch.tensor([math.nan, math.inf, -math.inf]))
    assert rounded[0].isnan()
    assert not rounded.isfinite().any()
    assert rounded[1:].isinf().all() == element.has_inf


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int32])
def test_only_float32_is_rounded(dtype: torch.dtype) -> None:
    """The bits of another dtype are read as those of float32: 1.3 and 2.7 in float16 become 1 and 3."""
    for numbers in ([1.3], [1.3, 2.7]):
        with pytest.raises(TypeError, match=rf"of float32, not {dtype}: pass tensor.float\(\)"):
            ELEMENTS["e4m3"].round(torch.tensor(numbers).to(dtype))
    with pytest.raises(TypeError, match="not list"):
        ELEMENTS["e4m3"].round([1.3])  # type: ignore[arg-type]


@each
def test_stochastic_rounding_keeps_values_and_expectation(element: ElementFormat) -> None:
    """Exact values move, or the mean is off: gradients gain a bias."""
    values = torch.tensor([float(v) for v in table(element)])
    for draw in (0, 2**23, 2**24 - 1):
        random = torch.full(values.shape, draw, dtype=torch.int32)
        assert same_bits(element.round(values, random), values)
        assert same_bits(element.round(-values, random), -values)
    low, high = values[3], values[4]
    x = (low + (high - low) * 0.25).expand(2**12)
    random = torch.arange(2**12, dtype=torch.int32) * 2**12  # evenly over all draws
    up = element.round(x, random) == high
    assert up.sum() == 2**10
    assert (element.round(-x, random) == -high).equal(up)


@each
def test_packing_holds_every_value(element: ElementFormat) -> None:
    """A value has a wrong code, so that memory or a native kernel reads another one."""
    values = torch.tensor([float(v) for v in table(element)])
    both = torch.cat([values, -values])
    packed = pack(both, element)
    assert same_bits(unpack(packed, element, len(both)), both)
    if element.bits == 6:
        half = len(values)
        assert packed.tolist() == list(range(2 * half))
    if element.bits == 4:  # the first of two in the low half
        assert packed.tolist() == [low | (low + 1) << 4 for low in range(0, 16, 2)]


@pytest.mark.parametrize("element", OWN, ids=[element.name for element in OWN])
def test_packing_holds_every_value_of_an_own_format(element: ElementFormat) -> None:
    """A format without a dtype of torch cannot be kept, or other values are read than were kept."""
    values = torch.tensor([float(v) for v in table(element)])
    both = torch.cat([values, -values[1:]])
    packed = pack(both, element)
    assert packed.element_size() == 1
    assert same_bits(unpack(packed, element, len(both)), both)


_IMPOSSIBLE: list[dict[str, Any]] = [
    *({"mantissa_bits": 4}, {"exponent_bits": 0}, {"max": 450.0}, {"max": 480.0}, {"max": 512.0}),
    *({"max": math.inf}, {"bias": 8, "max": 224.0}),
]


@pytest.mark.parametrize("change", _IMPOSSIBLE)
def test_formats_that_nothing_holds_are_refused(change: dict[str, Any]) -> None:
    """Codes of nine bits, or values that torch's dtype lacks, are cut off where they are stored."""
    with pytest.raises(ValueError, match=r"at most 8 bits|one of its values|does not hold the values"):
        replace(ELEMENTS["e4m3"], **change)


@pytest.mark.parametrize(("bias", "largest"), [(-114, 2.0**129), (-104, 2.0**119), (125, 2.0**-110)])
def test_formats_beyond_float32_are_refused(bias: int, largest: float) -> None:
    """Their values are inf, NaN or unrounded, or the error is one of torch about an overflow."""
    with pytest.raises(ValueError, match="choose a bias that leaves them within"):
        ElementFormat("mine", 4, 3, bias, largest, has_inf=False, has_nan=False, dtype=None)


@pytest.mark.parametrize("element", [(4, 3, 124, 2.0**-109), (4, 3, -103, 2.0**118)])
def test_formats_at_the_ends_of_float32_hold_their_values(element: tuple[int, int, int, float]) -> None:
    """A format that is accepted rounds its own values, or reads others than it has packed."""
    mine = ElementFormat("mine", *element, has_inf=False, has_nan=False, dtype=None)
    values = torch.tensor([float(value) for value in table(mine) if value <= mine.max])
    assert same_bits(mine.round(values), values)
    assert same_bits(unpack(pack(values, mine), mine, len(values)), values)
    for scale in SCALES:
        rounded = quantize(torch.randn(3, 32), Quantization(mine, 32, scale)).dequantize()
        assert rounded.isfinite().all()
        assert rounded.any()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"bias": 7.0}, "bias= must be an integer"),
        ({"exponent_bits": 4.0}, "exponent_bits= must be an integer"),
        ({"mantissa_bits": True}, "mantissa_bits= must be an integer"),
        ({"dtype": "float8_e4m3fn"}, "dtype= must be a torch.dtype"),
    ],
)
def test_fields_of_a_format_are_checked(change: dict[str, Any], text: str) -> None:
    """A number that is no integer fails where the first tensor is packed, without a word on the format."""
    with pytest.raises(TypeError, match=text):
        replace(ELEMENTS["e4m3"], **change)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda recipe: pickle.loads(pickle.dumps(recipe))])
def test_a_copied_recipe_packs_as_the_original(copied: Any) -> None:
    """A recipe that went to another process or into a copied policy takes a byte for each 4 bits."""
    recipe = copied(Recipe.nvfp4())
    assert recipe.weight.element is not E2M1
    x = torch.randn(16, 32)
    packed, wanted = quantize(x, recipe.weight).packed(), quantize(x, Recipe.nvfp4().weight).packed()
    assert torch.equal(packed.values, wanted.values)
    assert torch.equal(packed.dequantize(), wanted.dequantize())
    assert kind_of(recipe.weight) == "nvfp4"
