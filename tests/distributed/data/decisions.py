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

import amp_core

dist.init_process_group("gloo")
RANK, RANKS, WORLD = dist.get_rank(), dist.get_world_size(), dist.group.WORLD


class Side:
    """Parameters, one optimizer each, with a scaler; on one process those of all ranks."""

    def __init__(self, values: list[list[torch.Tensor]], alone: bool, options: dict) -> None:
        self.params = [
            [nn.Parameter(v.clone()) for v in (all_ranks if alone else all_ranks[RANK : RANK + 1])]
            for all_ranks in values
        ]
        self.optimizers = [torch.optim.SGD(params, lr=0.1, momentum=0.9) for params in self.params]
        over = {WORLD: [param for params in self.params for param in params]}
        ranks = {} if alone else {"process_group": WORLD, "sharded_over": over}
        self.alone = alone
        self.scaler = amp_core.GradScaler("cpu", allow_fp16_gradients=True, **options, **ranks)
        window = amp_core.AccumulationWindow
        self.windows = {
            "none": [],
            "own": [window(self.scaler, each) for each in self.optimizers],
            "shared": [window(self.scaler, self.optimizers)],
        }

    def add(self, grads: list[list[torch.Tensor | None]]) -> None:
        for params, all_ranks in zip(self.params, grads, strict=True):
            own = all_ranks if self.alone else all_ranks[RANK : RANK + 1]
            for param, grad in zip(params, own, strict=True):
                if grad is not None:
                    param.grad = grad.clone() if param.grad is None else param.grad + grad

    def step(self, micro_batches: list, window: str, style: str, max_norm: float) -> tuple:
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


def gradient(draw: random.Random, value: torch.Tensor, scale: float, largest: float) -> torch.Tensor:
    grad = (torch.randn(value.shape) * scale).to(value.dtype)
    grad[0] = draw.choice([*[grad[0]] * 12, math.inf, math.nan, largest])
    return grad


def program(draw: random.Random) -> None:
    torch.manual_seed(draw.randrange(2**30))
    dtypes = draw.choice([[torch.float32], [torch.float32, torch.float16]])
    count, size = draw.randint(1, 3), draw.randint(1, 5)
    values = [[torch.randn(size).to(draw.choice(dtypes)) for _ in range(RANKS)] for _ in range(count)]
    options = {"init_scale": draw.choice([2.0**-4, 1.0, 64.0]), "growth_interval": draw.randint(1, 3)}
    sides = [Side(values, alone, options) for alone in (False, True)]
    style = draw.choice(["none", "step", "together"])
    windows = {"together": ["none", "own", "shared", "shared"]}
    window = draw.choice(windows.get(style, ["none", "own"]))
    largest = 6e4 if torch.float16 in dtypes else 2e38
    max_norm = draw.choice([0.01, 1e6, math.inf])
    for _ in range(3):
        scale = sides[0].scaler.scale(torch.ones(())).item()
        sides[1].scaler.scale(torch.ones(()))
        micro_batches = [
            [
                [gradient(draw, v, scale, largest) if draw.random() < 0.6 else None for v in each]
                for each in values
            ]
            for _ in range(draw.randint(1, 3))
        ]
        if not all(any(g is not None for part in micro_batches for g in part[i]) for i in range(count)):
            continue  # one process refuses a step without gradients
        ours, theirs = (side.step(micro_batches, window, style, max_norm) for side in sides)
        assert ours == theirs, (ours, theirs, window, style, max_norm, options, values)
        for one, every in zip(sides[0].params, sides[1].params, strict=True):
            mine = every[RANK]
            near = 2e-2 if torch.float16 in dtypes else 1e-4
            torch.testing.assert_close(one[0], mine, rtol=near, atol=near, equal_nan=True)


for draw in programs(most=150, number="decisions"):
    program(draw)
dist.barrier()
print("all is well", flush=True)
os._exit(0)  # gloo's threads let go of tensors while the interpreter ends, and abort it (pytorch#190489)
