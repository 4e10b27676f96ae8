"""Regions inside what Dynamo traces in its own way: higher-order ops, transforms, generators, recursion.

Each program runs its construct twice, in regions drawn at random, and is held against itself uncompiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import OpPolicy, autocast
from amp_core.dispatch.activate import pushed

from ..drawn import programs

X = torch.linspace(-1, 1, 16).reshape(4, 4)
WEIGHT = X.flip(0) * 0.7
POLICY = OpPolicy.default("cpu").override({"mm": "fp32", "tanh": "lower_precision_fp"})
REGIONS: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: autocast("cpu", torch.bfloat16),
    "float16": lambda: autocast("cpu", torch.float16),
    "float32": lambda: autocast("cpu", torch.float32),
    "policy": lambda: autocast("cpu", policy=POLICY),
    "off": lambda: autocast("cpu", enabled=False),
    "disable": amp_core.disable,
}
Region = Callable[[], Any]


def product(region: Region, x: Tensor) -> Tensor:
    with region():
        return torch.mm(x, WEIGHT).tanh().float()


def cond(region: Region, x: Tensor) -> Tensor:
    def other(x: Tensor) -> Tensor:
        return product(region, x.neg())

    return torch.cond(x.sum() > 1, lambda x: product(region, x), other, (x,))


def while_(region: Region, x: Tensor) -> Tensor:
    start = torch.tensor(0), x
    result = while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, product(region, x)), start)
    return result[1]


def scanned(region: Region, x: Tensor) -> Tensor:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        carry = product(region, carry) + row
        return carry, carry.clone()

    return scan(step, torch.zeros(1, 4), x.unsqueeze(1))[1]


def mapped(region: Region, x: Tensor) -> Tensor:
    return map_rows(lambda row: product(region, row.unsqueeze(0)), x)


def vmapped(region: Region, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: product(region, row.unsqueeze(0)))(x)


def gradient(region: Region, x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: product(region, x).square().sum())(x)


def tangent(region: Region, x: Tensor) -> Tensor:
    return torch.func.jvp(lambda x: product(region, x).square(), (x,), (x,))[1]


def jacobian(region: Region, x: Tensor) -> Tensor:
    return torch.func.jacrev(lambda x: product(region, x).sum(0))(x)


def checkpointed(region: Region, x: Tensor) -> Tensor:
    return checkpoint(lambda x: product(region, x), x, use_reentrant=False)


def recursive(region: Region, x: Tensor, depth: int = 2) -> Tensor:
    with region():
        y = torch.mm(x, WEIGHT)
        return (recursive(region, y.float(), depth - 1) if depth else y).float()


def decorated(region: Region, x: Tensor) -> Tensor:
    return region()(lambda x: torch.mm(x, WEIGHT))(x).float()


def generated(region: Region, x: Tensor) -> Tensor:
    def rows() -> Iterator[Tensor]:
        yield torch.mm(x, WEIGHT)
        yield torch.mm(WEIGHT, x)

    return torch.stack([row.float() for row in region()(rows)()])


def by_context_manager(region: Region, x: Tensor) -> Tensor:
    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with region():
            yield

    with around():
        return torch.mm(x, WEIGHT).float()


def without_gradients(region: Region, x: Tensor) -> Tensor:
    with torch.no_grad(), region():
        y = torch.mm(x, WEIGHT)
    with torch.inference_mode(), region():
        z = torch.mm(x, WEIGHT)
    return y.float() - 2 * z.float()


CONSTRUCTS = [
    cond, while_, scanned, mapped, vmapped, gradient, tangent, jacobian, checkpointed, recursive, decorated,
    generated, by_context_manager, without_gradients,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_random_programs() -> None:
    """A region is lost, or kept too long, in a construct that Dynamo traces in its own way."""
    for choose in programs(8.0, 12):
        one, other = choose.choice(CONSTRUCTS), choose.choice(CONSTRUCTS)
        first, second = choose.choice(list(REGIONS)), choose.choice(list(REGIONS))
        backend, whole = choose.choice([("eager", False), ("aot_eager", True)])

        def program(x: Tensor, plan: Any = (one, other, first, second)) -> tuple[Tensor, Tensor, Tensor]:
            one, other, first, second = plan
            return one(REGIONS[first], x), other(REGIONS[second], x), torch.mm(x, x)

        torch._dynamo.reset()
        compiled = torch.compile(program, backend=backend, fullgraph=whole)
        for got, wanted in zip(compiled(X), program(X), strict=True):
            assert got.dtype is wanted.dtype, (one, other, first, second, backend)
            assert torch.equal(got, wanted), (one, other, first, second, backend)
        assert pushed() == 0
        assert not torch.is_autocast_enabled("cpu")
