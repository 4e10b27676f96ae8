"""Rules for autograd functions that have their own `jvp` and `vmap`, which torch calls beside `forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from amp_core import OpPolicy, autocast

pytestmark = pytest.mark.usefixtures("nothing_left")
LOW = torch.bfloat16
X, W = torch.linspace(-1, 1, 16).reshape(4, 4), torch.linspace(-2, 1, 16).reshape(4, 4)
Compute = Callable[[Tensor, Tensor], Tensor]


class Product(torch.autograd.Function):
    """A product that says how it is differentiated forwards, and how it takes batches."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x.mm(w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient.mm(w.t()), x.t().mm(gradient)

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor | None, w_tangent: Tensor | None) -> Tensor:
        x, w = ctx.saved_tensors
        parts = [] if x_tangent is None else [x_tangent.mm(w)]
        return sum(parts if w_tangent is None else [*parts, x.mm(w_tangent)])  # type: ignore[return-value]

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor) -> tuple[Tensor, int]:
        assert in_dims == (0, None)
        assert info.batch_size == len(x)
        return x @ w, 0


def product(x: Tensor, w: Tensor) -> Tensor:
    return Product.apply(x, w)  # type: ignore[no-any-return, no-untyped-call]


TRANSFORMS: dict[str, Callable[[Compute, Tensor], Any]] = {
    "jvp": lambda f, x: jvp(f, (x, W), (x + 1, W - 1)),
    "jvp of one": lambda f, x: jvp(lambda w: f(x, w), (W,), (W - 1,)),
    "vmap": lambda f, x: vmap(f, (0, None))(torch.stack([x, x + 1]), W),
    "gradients of samples": lambda f, x: vmap(
        grad(lambda x, w: f(x, w).float().square().sum(), (0, 1)), (0, None)
    )(torch.stack([x, x + 1]), W),
    "tangents of samples": lambda f, x: jvp(
        lambda x: vmap(f, (0, None))(x, W), (torch.stack([x, x + 1]),), (torch.stack([x, x]),)
    ),
}


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch's own forward mode, when first used
@pytest.mark.parametrize("given", [torch.float32, LOW])
@pytest.mark.parametrize(("rule", "dtype"), [("fp32", torch.float32), ("lower_precision_fp", LOW)])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_function_with_a_rule(transform: str, rule: str, dtype: torch.dtype, given: torch.dtype) -> None:
    """Tangents and batches of a function in float32 have low precision, or dtypes are mixed."""
    policy = OpPolicy.default("cpu").override({Product: rule})

    def ruled(x: Tensor, w: Tensor) -> Tensor:
        with autocast("cpu", LOW, policy=policy):
            return product(x, w)

    run, x = TRANSFORMS[transform], X.to(given)
    wanted = run(lambda x, w: product(x.to(dtype), w.to(dtype)), x)
    torch.testing.assert_close(run(ruled, x), wanted, rtol=0, atol=0)
