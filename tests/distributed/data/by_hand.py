"""Training of several ranks with float32 loss scaling by hand, in one process that has all their data."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Grads = list[list[Any]]
"""By owner and parameter; None for no gradient."""
ROWS = 3

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params, **how: torch.optim.SGD(params, lr=0.1, momentum=0.9, **how),
    "dampened": lambda params, **how: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5, **how),
    "adamw": lambda params, **how: torch.optim.AdamW(params, lr=0.01, eps=0.1, **how),
    "adagrad": lambda params, **how: torch.optim.Adagrad(params, lr=0.05, eps=0.1, **how),
}
SPARSE = ("plain_sgd", "adagrad")
KINDS["plain_sgd"] = lambda params, **how: torch.optim.SGD(params, lr=0.1, **how)


class Part(nn.Module):
    """What one optimizer has: a table that may have sparse gradients, a layer, and one not always in use."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=sparse)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, numbers: Tensor, deep: bool = True) -> Tensor:
        hidden = self.first(self.table(numbers).tanh()).tanh()
        return self.last(hidden) if deep else hidden[:, :2]


class Batch:
    """What one rank computes of one part in one micro-batch; None of it if there is no backward pass."""

    def __init__(self, draw: random.Random, bad: float, idle: float, shallow: float) -> None:
        self.numbers = torch.tensor([draw.randrange(5) for _ in range(ROWS)])
        self.factors = torch.tensor([draw.uniform(0.5, 2.0), draw.uniform(0.5, 2.0)])
        if draw.random() < bad:
            self.factors[draw.randrange(2)] = draw.choice([math.inf, math.nan, -math.inf])
        self.idle, self.deep = draw.random() < idle, draw.random() >= shallow

    def loss(self, model: nn.Module) -> Tensor:
        return (model(self.numbers, self.deep).square() * self.factors).mean()


class Reference:
    """Parts, optimizers and scales of all ranks."""

    def __init__(self, plan: Any, parts: list[list[Part]]) -> None:
        self.plan = plan
        self.parts = parts  # by rank; those of one if ranks share the parameters
        self.optimizers = [
            [KINDS[kind](p.parameters(), foreach=False) for kind, p in zip(plan.kinds, each, strict=True)]
            for each in parts
        ]
        self.scales = {key: [plan.init_scale, 0] for key in plan.keys}
        self.kept: set[Tensor] = set()  # parameters with zeros of zero_grad(set_to_none=False)

    def step(self, micro_batches: list[list[list[Batch]]]) -> tuple[list[bool], list[tuple[int, ...]], list]:
        """Return which optimizers skip, their bad micro-batches, and their norms.

        What is computed is given by micro-batch, part and rank.
        """
        plan, parts = self.plan, range(len(self.plan.kinds))
        found = [[self.gradients(i, batches[i]) for i in parts] for batches in micro_batches]
        bad = [[any_bad(each) for each in of_parts] for of_parts in found]
        if plan.window == "shared":
            bad = [[any(flags)] * len(flags) for flags in bad]
        grads = [self.unscaled(i, self.total(i, found, bad)) for i in parts]
        skipped = [any_bad(each) for each in grads]
        together = plan.clip == "together"
        if together:
            skipped = [any(skipped)] * len(skipped)
        groups = [[*parts]] if together else [[i] for i in parts]
        norms = [
            self.clip([grads[i] for i in group]) for group in groups for _ in group[: plan.clip != "none"]
        ]
        for i in parts:
            if not skipped[i]:
                self.update(i, grads[i])
        left_out = [tuple(n for n, flags in enumerate(bad) if flags[i]) for i in parts]
        for key in {*plan.keys}:
            mine = [i for i in parts if plan.keys[i] == key]
            self.move(key, any(skipped[i] or (plan.takes_out and left_out[i]) for i in mine))
        first = None if plan.leave_out else 1
        return skipped, [each[:first] for each in left_out], norms * (len(parts) if together else 1)

    def gradients(self, part: int, batches: list[Batch]) -> Grads:
        """Return the scaled gradients of one micro-batch, by owner and parameter."""
        scale, every = self.scales[self.plan.keys[part]][0], []
        for rank, batch in enumerate(batches):
            model = self.parts[rank % len(self.parts)][part]
            params = [*model.parameters()]
            grads = [None] * len(params)
            if not batch.idle:
                grads = torch.autograd.grad(batch.loss(model) * scale, params, allow_unused=True)
            every.append([None if g is None else g.to_dense() for g in grads])
        if len(self.parts) > 1:
            return every
        return [[sum(g / len(batches) for g in of_ranks) for of_ranks in zip(*every, strict=True)]]

    def total(self, part: int, found: list[list[Grads]], bad: list[list[bool]]) -> Grads:
        """Return the sum of the micro-batches; in a window, of the good ones, if there are any."""
        plan, numbers = self.plan, range(len(found))
        group = range(len(plan.kinds)) if plan.window == "shared" else [part]
        used = [any(g is not None for i in group for each in found[n][i] for g in each) for n in numbers]
        good = [n for n in numbers if used[n] and not bad[n][part]]
        takes_out = plan.takes_out and bool(good)
        factor = sum(used) / len(good) if takes_out and plan.reweight else 1.0
        sums = []
        for owner, each in enumerate(self.parts):
            sums.append([])
            for p, param in enumerate(each[part].parameters()):
                grads = [(n, g) for n in numbers if (g := found[n][part][owner][p]) is not None]
                counted = [g * factor for n, g in grads if not takes_out or n in good]
                if grads and not plan.set_to_none:
                    self.kept.add(param)
                zeros = torch.zeros_like(param) if grads or param in self.kept else None
                sums[-1].append(sum(counted) if counted else zeros)
        return sums

    def unscaled(self, part: int, grads: Grads) -> Grads:
        scale = self.scales[self.plan.keys[part]][0]
        return [[None if g is None else g.double() / scale for g in each] for each in grads]

    def clip(self, of_parts: list[Grads]) -> float:
        """Clip by the norm of all ranks and return it."""
        grads = [g for grads in of_parts for each in grads for g in each if g is not None]
        flat = torch.cat([torch.zeros(1, dtype=torch.float64), *[g.flatten() for g in grads]])
        norm = float(torch.linalg.vector_norm(flat, self.plan.order))
        if math.isfinite(norm):
            for g in grads:
                g.mul_(min(1.0, self.plan.max_norm / (norm + 1e-6)))
        return norm

    def update(self, part: int, grads: Grads) -> None:
        for each, optimizers, own in zip(self.parts, self.optimizers, grads, strict=True):
            for param, g in zip(each[part].parameters(), own, strict=True):
                param.grad = None if g is None else g.float()
            optimizers[part].step()

    def move(self, key: str | None, overflow: bool) -> None:
        scale, count = self.scales[key]
        grows = not overflow and count + 1 == self.plan.interval
        scale *= 0.25 if overflow else 2.0 if grows else 1.0
        self.scales[key] = [scale, 0 if overflow or grows else count + 1]


def any_bad(grads: Grads) -> bool:
    return any(not g.float().isfinite().all() for each in grads for g in each if g is not None)
