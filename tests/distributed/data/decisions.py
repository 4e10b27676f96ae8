"""Random steps of ranks whose gradients differ, against one process that has all of them."""

from __future__ import annotations

import math
import os
import random
from contextlib import ExitStack

import torch
import torch.distributed as dist
from drawn import programs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import amp_core

dist.init_process_group("gloo")
RANK, RANKS, WORLD = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
MESH = init_device_mesh("cpu", (RANKS,))


class Side:
    """Parameters, one optimizer each, with a scaler; on one process those of all ranks.

    `cut` says that ranks have DTensors, the parts of one parameter each. Otherwise they have parameters of
    their own.
    """

    def __init__(self, values: list[list[torch.Tensor]], alone: bool, cut: bool, options: dict) -> None:
        self.alone, self.cut = alone, cut
        self.params = [[nn.Parameter(v) for v in self.here(all_ranks)] for all_ranks in values]
        self.optimizers = [torch.optim.SGD(params, lr=0.1, momentum=0.9) for params in self.params]
        over = {WORLD: [param for params in self.params for param in params]}
        ranks = {} if alone or cut else {"process_group": WORLD, "sharded_over": over}
        self.scaler = amp_core.GradScaler("cpu", allow_fp16_gradients=True, **options, **ranks)
        window = amp_core.AccumulationWindow
        self.windows = {
            "none": [],
            "own": [window(self.scaler, each) for each in self.optimizers],
            "shared": [window(self.scaler, self.optimizers)],
        }

    def here(self, all_ranks: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return what this side has of the tensors that all ranks have."""
        if self.cut:
            return [
                v if v is None or self.alone else distribute_tensor(v, MESH, [Shard(0)]) for v in all_ranks
            ]
        return [*all_ranks] if self.alone else all_ranks[RANK : RANK + 1]

    def add(self, grads: list[list[torch.Tensor | None]]) -> None:
        for params, all_ranks in zip(self.params, grads, strict=True):
            for param, grad in zip(params, self.here(all_ranks), strict=True):
                if grad is not None:
                    param.grad = grad.clone() if param.grad is None else param.grad + grad

    def step(self, before: list, micro_batches: list, window: str, style: str, max_norm: float) -> tuple:
        self.add(before)
        with ExitStack() as stack:
            for each in self.windows[window]:
                stack.enter_context(each)
            for grads in micro_batches:
                with ExitStack() as inner:
                    for each in self.windows[window]:
                        inner.enter_context(each.micro_batch())
                    self.add(grads)
        if style == "together":
            self.scaler.clip_grad_norm_(self.optimizers, max_norm)
        for each in self.optimizers:
            self.scaler.step(each, max_norm=max_norm if style == "step" else None)
        landed = [bool(self.scaler.landed(each)) for each in self.optimizers]
        bad = [self.scaler.last_step[each].bad_micro_batches for each in self.optimizers]
        self.scaler.update()
        for each in self.optimizers:
            each.zero_grad()
        return landed, bad, self.scaler.get_scale()


def gradient(draw: random.Random, value: torch.Tensor, scale: float, special: list) -> torch.Tensor:
    grad = (torch.randn(value.shape) * scale).to(value.dtype)
    place = draw.randrange(len(grad))
    grad[place] = draw.choice([*[grad[place]] * 12, *special])
    return grad


def gradients(draw: random.Random, values: list, scale: float, special: list, share: float) -> list:
    return [
        [gradient(draw, v, scale, special) if draw.random() < share else None for v in each]
        for each in values
    ]


def program(draw: random.Random) -> None:
    torch.manual_seed(draw.randrange(2**30))
    dtypes = draw.choice([[torch.float32], [torch.float32, torch.float16]])
    count, size, cut = draw.randint(1, 3), draw.randint(1, 5), draw.random() < 0.5
    values = [[torch.randn(size).to(draw.choice(dtypes)) for _ in range(RANKS)] for _ in range(count)]
    options = {"init_scale": draw.choice([2.0**-4, 1.0, 64.0]), "growth_interval": draw.randint(1, 3)}
    sides = [
        Side([[v.clone() for v in each] for each in values], alone, cut, options) for alone in (False, True)
    ]
    style = draw.choice(["none", "step", "together"])
    windows = {"together": ["none", "own", "shared", "shared"]}
    window = draw.choice(windows.get(style, ["none", "own"]))
    special = [math.inf, math.nan, 6e4 if torch.float16 in dtypes else 2e38]
    max_norm = draw.choice([0.01, 1e6, math.inf])
    for _ in range(3):
        scale = sides[0].scaler.scale(torch.ones(())).item()
        sides[1].scaler.scale(torch.ones(()))
        before = gradients(draw, values, scale, [0.0], draw.choice([0.0, 0.0, 0.3]))
        micro_batches = [gradients(draw, values, scale, special, 0.6) for _ in range(draw.randint(1, 3))]
        if not all(any(g is not None for part in micro_batches for g in part[i]) for i in range(count)):
            continue  # one process refuses a step without gradients
        ours, theirs = (side.step(before, micro_batches, window, style, max_norm) for side in sides)
        assert ours == theirs, (ours, theirs, window, style, max_norm, options, values)
        for one, every in zip(sides[0].params, sides[1].params, strict=True):
            pairs = [(one[0], every[RANK])]
            if cut:
                pairs = [(mine.full_tensor(), whole) for mine, whole in zip(one, every, strict=True)]
            near = 2e-2 if torch.float16 in dtypes else 1e-4
            for mine, whole in pairs:
                torch.testing.assert_close(mine, whole, rtol=near, atol=near, equal_nan=True)


for draw in programs(most=150, number="decisions"):
    program(draw)
dist.barrier()
print("all is well", flush=True)
os._exit(0)  # gloo's threads let go of tensors while the interpreter ends, and abort it (pytorch#190489)
