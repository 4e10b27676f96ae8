"""Policies under transforms of `torch.func`, which take ops apart before their rules apply."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amp_core import OpPolicy, apply_policy, autocast

pytestmark = pytest.mark.usefixtures("nothing_left")
CPU = OpPolicy.default("cpu")
PRODUCTS = dict.fromkeys(("linear", "matmul", "mm", "addmm", "bmm", "baddbmm"), "fp32")
X, BIAS = torch.linspace(-1, 1, 32).reshape(4, 8), torch.linspace(1, 2, 8)
W = torch.linspace(-2, 1, 64).reshape(8, 8)
Compute = Callable[[Tensor], Tensor]

OPS: dict[str, Compute] = {
    "linear": lambda w: F.linear(X, w),
    "linear with bias": lambda w: F.linear(X, w, BIAS),
    "matmul": lambda w: X @ w,
    "batches": lambda w: X.expand(3, 4, 8) @ w,
    "rows of batches": lambda w: F.linear(X.expand(3, 4, 8), w, BIAS),
}
TRANSFORMS: dict[str, Callable[[Compute], Any]] = {
    "grad": lambda f: torch.func.grad(lambda w: f(w).float().square().sum())(W),
    "vmap": lambda f: torch.vmap(f)(torch.stack([W, W + 1])),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(lambda w: f(w).float().sum()))(torch.stack([W, W])),
    "jvp": lambda f: torch.func.jvp(f, (W,), (W + 1,)),
    "jacrev": lambda f: torch.func.jacrev(f)(W),
    "hessian": lambda f: torch.func.hessian(lambda w: f(w).float().square().sum())(W),
    "functionalize": lambda f: torch.func.functionalize(f)(W),
}


def low(compute: Compute, policy: OpPolicy | None) -> Compute:
    def run(w: Tensor) -> Tensor:
        with autocast("cpu", torch.bfloat16, policy=policy):
            return compute(w)

    return run


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch's own forward mode, when first used
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("op", OPS)
def test_one_rule_for_all_products(op: str, transform: str) -> None:
    """The advice of the documentation does not hold: low precision, or an error of mixed dtypes."""
    got = TRANSFORMS[transform](low(OPS[op], CPU.override(PRODUCTS)))
    torch.testing.assert_close(got, TRANSFORMS[transform](OPS[op]), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_module_in_float32(transform: str) -> None:
    """A module's rule is lost in a transform, and its weights get gradients of low precision."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False))

    def compute(w: Tensor) -> Tensor:
        return torch.func.functional_call(model, {"0.weight": w}, (X,))  # type: ignore[no-any-return]

    wanted = TRANSFORMS[transform](compute)
    with apply_policy(model, {"0": "fp32"}):
        got = TRANSFORMS[transform](low(compute, None))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


WITH_NUMBERS: dict[str, Compute] = {
    "mul": lambda w: w * 2.0,
    "mul from the left": lambda w: 2 * w,
    "mul_": lambda w: w.clone().mul_(0.5),
    "add": lambda w: torch.add(w, 1, alpha=2),
    "sub": lambda w: w - 1.5,
    "rsub": lambda w: 1 - w,
    "div": lambda w: w / 3,
    "fmod": lambda w: torch.fmod(w, 0.75),
    "pow": lambda w: 2.0**w,
    "gt": lambda w: w * (w > 0.5),
    "where": lambda w: torch.where(w > 0, w, -1.0),
}
RULES = ("fp32", "lower_precision_fp", "promote_types", "low_in_fp32_out")


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("op", WITH_NUMBERS)
def test_ops_between_a_tensor_and_a_number(op: str, transform: str) -> None:
    """Once a policy has a rule for the op, transforms raise: torch cannot tell its kernel the number."""
    compute, run = WITH_NUMBERS[op], TRANSFORMS[transform]
    name = op.split(maxsplit=1)[0]
    wanted = run(compute)
    for rule in RULES:
        got = run(low(compute, CPU.override({name: rule})))
        if "low" in rule:
            torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02, check_dtype=False)
        else:
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    torch.testing.assert_close(run(low(compute, None)), wanted, rtol=0, atol=0)


TANGENT = """
import torch
from amp_core import OpPolicy, autocast

policy = OpPolicy.default("cpu").override({"mul": "fp32"})
with autocast("cpu", policy=policy):
    result, tangent = torch.func.jvp(lambda x: x / 2.0, (torch.ones(2),), (torch.ones(2),))
assert tangent.tolist() == [0.5, 0.5]
"""


def test_the_tangent_of_a_number() -> None:
    """It has no memory: the product with it raises. In a process of its own, as a rule for div hides that."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", TANGENT], check=True)


def test_what_vmap_takes_apart_as_under_torch() -> None:
    """The documentation says that torch loses such rules; if it no longer does, neither must we."""
    images, weight = torch.ones(2, 1, 3, 5), torch.ones(2, 3, 3)
    batched = torch.vmap(lambda x: F.conv1d(x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        wanted = batched(images)
    with autocast("cpu", torch.bfloat16, policy=CPU.override({"conv1d": "lower_precision_fp above 1 FLOP"})):
        got = batched(images)
    assert (got.dtype, wanted.dtype) == (torch.float32, torch.float32)
    assert torch.equal(got, wanted)


class Attention(nn.Module):
    """Attention of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_attention_of_a_module_in_float32() -> None:
    """Torch computes it in Python from other ops, and a module's rule does not hold for these either."""
    heads = torch.nested.nested_tensor_from_jagged(X, torch.tensor([0, 1, 4])).unflatten(-1, [2, 4])
    low = heads.transpose(1, 2).bfloat16()
    model = nn.Sequential(Attention())
    with apply_policy(model, {"0": "fp32"}, device_type="cpu"), autocast("cpu", torch.bfloat16):
        got = model(low)
    wanted = model(low.float())
    assert got.dtype is torch.float32
    assert torch.equal(got.values(), wanted.values())
