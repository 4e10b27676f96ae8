"""Random programs of regions and policies under transforms, against the same programs with casts by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hvp, jacobian
from torch.func import functionalize, grad, jacrev, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import amp_core
from amp_core import OpPolicy, autocast

from .. import alike
from ..drawn import programs

pytestmark = pytest.mark.usefixtures("nothing_left")
CPU = OpPolicy.default("cpu")
PRODUCTS = ("mm", "bmm", "matmul", "linear", "addmm", "baddbmm")
UNARY, BINARY = ("exp", "tanh", "sigmoid"), ("mul", "add", "sub", "mm", "matmul")
DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
X, W = torch.linspace(-0.5, 0.5, 9).reshape(3, 3), torch.linspace(0.6, -0.4, 9).reshape(3, 3)
XS, WS = torch.stack([X, X.t(), X + 0.1]), torch.stack([W, W.t(), W - 0.1])
Compute = Callable[[Tensor, Tensor], Tensor]
Rules = dict[str, str]


def loss(f: Compute) -> Compute:
    return lambda x, w: f(x, w).float().square().sum()


def squares(tensors: Any) -> Tensor:
    return sum(each.float().square().sum() for each in tensors)  # type: ignore[return-value]


def twice(f: Compute) -> Any:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    first = torch.autograd.grad(loss(f)(x, w), (x, w), create_graph=True, materialize_grads=True)
    return torch.autograd.grad(squares(first), (x, w), materialize_grads=True)


TRANSFORMS: dict[str, Callable[[Compute], Any]] = {
    "none": lambda f: f(X, W),
    "grad": lambda f: grad(loss(f), (0, 1))(X, W),
    "grad of grad": lambda f: grad(lambda x, w: squares(grad(loss(f), (0, 1))(x, w)), (0, 1))(X, W),
    "double backward": twice,
    "vmap": lambda f: vmap(f)(XS, WS),
    "vmap over weights": lambda f: vmap(f, (None, 0))(X, WS),
    "gradients of samples": lambda f: vmap(grad(loss(f), (0, 1)), (0, None))(XS, W),
    "gradient of batches": lambda f: grad(lambda x: vmap(loss(f))(x, WS).sum())(XS),
    "vjp": lambda f: vjp(loss(f), X, W)[1](torch.ones(())),
    "jacrev": lambda f: jacrev(f, (0, 1))(X, W),
    "functionalize": lambda f: functionalize(grad(loss(f)))(X, W),
    "make_fx": lambda f: make_fx(grad(loss(f)))(X, W)(XS[2], WS[1]),
    "jacobian": lambda f: jacobian(f, (X, W), vectorize=True),
    "hvp": lambda f: hvp(loss(f), (X, W), (WS[1], XS[1])),
}


@dataclass
class State:
    """What is in force in a part of a program whose casts are written by hand."""

    dtype: torch.dtype = torch.bfloat16
    enabled: bool = False
    rules: Rules = field(default_factory=lambda: dict.fromkeys(PRODUCTS, "lower_precision_fp"))

    def cast(self, op: str, tensors: list[Tensor]) -> list[Tensor]:
        rule = self.rules.get(op, "unchanged") if self.enabled else "unchanged"
        if rule == "unchanged":
            return tensors
        return [t.to(torch.float32 if rule == "fp32" else self.dtype) for t in tensors]


@dataclass
class Block:
    """A region around ops and other blocks."""

    dtype: torch.dtype
    enabled: bool
    rules: Rules | None
    decorated: bool
    parts: list[str | Block]

    @classmethod
    def draw(cls, choose: random.Random, depth: int) -> Block:
        rules = dict.fromkeys(PRODUCTS, choose.choice(["fp32", "lower_precision_fp", "unchanged"]))
        for op in (*UNARY, "mul", "sub"):
            rules[op] = choose.choice(["fp32", "lower_precision_fp", "unchanged", "unchanged"])
        own = rules if choose.random() < 0.6 else None
        inner = ["block"] * (2 * depth)
        kinds = [choose.choice([*UNARY, *BINARY, *inner]) for _ in range(choose.randrange(1, 4))]
        parts = [cls.draw(choose, depth - 1) if kind == "block" else kind for kind in kinds]
        return cls(choose.choice(DTYPES), choose.random() < 0.85, own, choose.random() < 0.3, parts)

    def by_region(self, x: Tensor, w: Tensor) -> Tensor:
        policy = None if self.rules is None else CPU.override(self.rules)
        # Casts by hand are not shared, and neither are the sums of their gradients.
        region = autocast("cpu", self.dtype, self.enabled, cache_enabled=False, policy=policy)
        run = region(self.run) if self.decorated else self.run
        with nullcontext() if self.decorated else region:
            return run(x, w, None)

    def by_hand(self, x: Tensor, w: Tensor, around: State | None = None) -> Tensor:
        around = around or State()
        own = self.rules is not None and self.enabled
        state = replace(around, dtype=self.dtype, enabled=self.enabled)
        return self.run(x, w, replace(state, rules=self.rules) if own else state)  # type: ignore[arg-type]

    def run(self, x: Tensor, w: Tensor, state: State | None) -> Tensor:
        for part in self.parts:
            if isinstance(part, Block):
                x = part.by_region(x, w) if state is None else part.by_hand(x, w, state)
                continue
            given = [x] if part in UNARY else [x, w.to(x.dtype)]
            x = getattr(torch, part)(*(given if state is None else state.cast(part, given)))
        return x


def test_random_programs() -> None:
    """A transform loses a region, a policy or the end of one, or gradients get dtypes of another region."""
    for choose in programs(6.0):
        program, name = Block.draw(choose, 3), choose.choice(list(TRANSFORMS))
        got, wanted = (TRANSFORMS[name](f) for f in (program.by_region, program.by_hand))
        found, expected = (torch.utils._pytree.tree_leaves(each) for each in (got, wanted))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert alike.same(one, other, 1e-5, 1e-6), (name, program, one, other)
        assert not torch.is_autocast_enabled("cpu"), (name, program)
        with amp_core.disable():
            assert torch.mm(X, W).dtype is torch.float32
