"""Regions of float32: `autocast(device, dtype=torch.float32)`."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch

import amp_core
from amp_core import OpPolicy

LOW = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).bfloat16()


def dtypes() -> list[torch.dtype]:
    outs = [torch.mm(LOW, LOW), torch.nn.functional.linear(LOW, LOW), torch.cat([LOW, LOW.float()])]
    return [out.dtype for out in outs]


@pytest.mark.parametrize("device", ["cpu", "mps", "mtia", "xpu"])
def test_admitted_where_torch_refuses(device: str) -> None:
    """A float32 region is disabled, with a warning, as in torch."""
    with pytest.warns(UserWarning, match="target dtype is not supported"):
        torch.autocast(device, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        region = amp_core.autocast(device, dtype=torch.float32)
    with region:
        assert torch.is_autocast_enabled(device)
        assert torch.get_autocast_dtype(device) is torch.float32


def test_ops_of_low_precision_run_in_float32() -> None:
    """Inputs that are bfloat16 stay so, and the result is as inexact as outside the region."""
    with amp_core.autocast("cpu", dtype=torch.float32):
        assert dtypes() == [torch.float32] * 3
        assert torch.equal(torch.mm(LOW, LOW), torch.mm(LOW.float(), LOW.float()))


def test_an_island_in_a_region_of_low_precision() -> None:
    """The outer region does not come back, or weights keep the cast of the other dtype."""
    weight = torch.randn(4, 4, requires_grad=True)
    with amp_core.autocast("cpu"):
        before = torch.mm(weight, weight)
        with amp_core.autocast("cpu", dtype=torch.float32):
            inside = torch.mm(weight, weight)
        after = torch.mm(weight, weight)
    assert [t.dtype for t in (before, inside, after)] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert torch.equal(inside, weight @ weight)


def test_with_a_policy() -> None:
    """A policy that is not the default is lost in a float32 region, or its low-precision ops stay low."""
    policy = OpPolicy.default("cpu").override({"softmax": "lower_precision_fp"})
    with amp_core.autocast("cpu", dtype=torch.float32, policy=policy):
        assert torch.softmax(LOW, -1).dtype is torch.float32
        assert dtypes() == [torch.float32] * 3


@pytest.mark.parametrize(
    "policy", [None, OpPolicy.default("cpu").override({"softmax": "lower_precision_fp"})]
)
def test_compiled(policy: OpPolicy | None) -> None:
    """Dynamo builds torch's own region, which would be disabled: bfloat16 without a word."""

    def inside() -> list[torch.dtype]:
        with amp_core.autocast("cpu", dtype=torch.float32, policy=policy):
            return [torch.mm(LOW, LOW), torch.softmax(LOW, -1)]

    eager = inside()
    torch._dynamo.reset()
    compiled = torch.compile(inside, fullgraph=True, backend="aot_eager")()
    assert [t.dtype for t in compiled] == [t.dtype for t in eager]
    for ours, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not torch.is_autocast_enabled("cpu")


def test_built_outside_compiled_code() -> None:
    """Dynamo enters such a region as torch's own: disabled."""
    region = amp_core.autocast("cpu", dtype=torch.float32)

    def inside() -> torch.Tensor:
        with region:
            return torch.mm(LOW, LOW)

    torch._dynamo.reset()
    assert torch.compile(inside, fullgraph=True, backend="eager")().dtype is inside().dtype is torch.float32


EXACT = OpPolicy.default("cpu").override({"softmax": "fp32"})
OUTER = {
    "none": nullcontext,
    "low": lambda: amp_core.autocast("cpu"),
    "exact": lambda: amp_core.autocast("cpu", policy=EXACT),
}
INNER = {
    "none": nullcontext,
    "bfloat16": lambda: amp_core.autocast("cpu", dtype=torch.bfloat16),
    "float16": lambda: amp_core.autocast("cpu", dtype=torch.float16),
    "as around": lambda: amp_core.autocast("cpu", policy=EXACT),
    "float32": lambda: amp_core.autocast("cpu", dtype=torch.float32, policy=EXACT),
    "torch": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "off": lambda: amp_core.autocast("cpu", enabled=False),
}
MODULES = {
    "none": {},
    "low": {"0": {"linear": "lower_precision_fp"}, "1": {"softmax": "lower_precision_fp"}},
    "recipe": {"0": {"linear": amp_core.Recipe.mxfp8()}},
}


@pytest.mark.parametrize("rules", MODULES)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("outer", OUTER)
def test_compiled_with_what_is_around_and_inside(outer: str, inner: str, rules: str) -> None:
    """In a compiled float32 region, rules of modules compute in bfloat16, and regions inside in float32."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.float64).bfloat16(), torch.nn.Softmax(-1))

    def inside(x: torch.Tensor) -> list[torch.Tensor]:
        with OUTER[outer](), amp_core.autocast("cpu", dtype=torch.float32):
            first = model(x)
            with INNER[inner]():
                return [first, model(x), torch.mm(x, x), torch.get_autocast_dtype("cpu")]

    torch._dynamo.reset()
    with nullcontext() if rules == "none" else amp_core.apply_policy(model, MODULES[rules]), torch.no_grad():
        *eager, its_dtype = inside(LOW)
        *compiled, dtype = torch.compile(inside, fullgraph=True, backend="aot_eager")(LOW)
    assert dtype is its_dtype
    for ours, theirs in zip(compiled, eager, strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)


def test_export_is_refused() -> None:
    """An exported program computes in bfloat16 what eager computes in float32."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with amp_core.autocast("cpu", dtype=torch.float32):
                return torch.mm(x, x)

    with pytest.raises(Exception, match=r"torch\.export cannot keep"):
        torch.export.export(Model(), (LOW,), strict=True)
