"""`custom_fwd` and `custom_bwd` under transforms of `torch.func`, which may never call `forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from amp_core import OpPolicy, autocast, custom_bwd, custom_fwd

X, W = torch.linspace(-1, 1, 27).reshape(3, 3, 3), torch.linspace(-2, 1, 9).reshape(3, 3)
EXACT = OpPolicy.default("cpu").override(dict.fromkeys(("mm", "bmm", "matmul"), "fp32"))
REGIONS: dict[str, Callable[[], Any]] = {
    "none": lambda: autocast("cpu", enabled=False),
    "bfloat16": lambda: autocast("cpu", torch.bfloat16),
    "float16": lambda: autocast("cpu", torch.float16),
    "policy": lambda: autocast("cpu", torch.bfloat16, policy=EXACT),
}
Compute = Callable[[Tensor, Tensor], Tensor]
TRANSFORMS: dict[str, Callable[[Compute], Any]] = {
    "gradients of samples": lambda f: vmap(grad(f, (0, 1)), (0, None))(X, W),
    "gradient of batches": lambda f: grad(lambda x, w: vmap(f, (0, None))(x, w).sum(), (0, 1))(X, W),
    "jacrev": lambda f: jacrev(f, (0, 1))(X[0], W),
    "jacrev of grad": lambda f: jacrev(grad(f))(X[0], W),
}


def made(own_vmap: bool, cast_inputs: torch.dtype | None, seen: list[Any]) -> Any:
    """Return a function whose backward notes the state that it runs in."""

    class Product(torch.autograd.Function):
        generate_vmap_rule = not own_vmap

        @staticmethod
        @custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(x: Tensor, w: Tensor) -> Tensor:
            return x.mm(w)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x, w = ctx.saved_tensors
            low = torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), low))
            return gradient.float().mm(w.t()), x.t().mm(gradient.float())

        if own_vmap:

            @staticmethod
            def vmap(_info: Any, in_dims: Any, x: Tensor, w: Tensor) -> tuple[Tensor, int]:
                assert in_dims[0] == 0
                return x @ w, 0

    return Product


@pytest.mark.parametrize("cast_inputs", [None, torch.float32])
@pytest.mark.parametrize(
    ("transform", "own_vmap"),
    [*((name, False) for name in TRANSFORMS), *((name, True) for name in TRANSFORMS if "batch" not in name)],
)
def test_the_state_of_the_backward(transform: str, own_vmap: bool, cast_inputs: torch.dtype | None) -> None:
    """Where torch calls `vmap` in place of `forward`, the backward finds no state, or one of another call."""
    seen: list[Any] = []
    function = made(own_vmap, cast_inputs, seen)
    for name in ("float16", "bfloat16", "none", "policy", "bfloat16"):

        def compute(x: Tensor, w: Tensor, name: str = name) -> Tensor:
            with REGIONS[name]():
                result = function.apply(x, w)
            return result.float().square().sum()

        with REGIONS[name]():
            dtype = torch.get_autocast_dtype("cpu")
        TRANSFORMS[transform](compute)
        enabled = name != "none" and cast_inputs is None
        exact = not enabled or name == "policy"
        assert set(seen) == {(enabled, dtype, torch.float32 if exact else dtype)}, name
        seen.clear()
