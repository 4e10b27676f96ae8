"""Policies under transforms of `torch.func`, which take ops apart before their rules apply."""

from __future__ import annotations

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
