"""Gradients of float64 on one rank alone, beside others or none: a scene of `ranks.py`."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import nn

import amp_core


def wide() -> None:
    """A norm that float64 holds and float32 does not, at a scale below 1: all ranks skip."""
    narrow = (torch.float32, None)  # the last rank has no gradient
    for dtype, magnitude, calls in itertools.product(narrow, (1e37, 1e200), ("step", "clip_grad_norm_")):
        own = torch.float64 if dist.get_rank() == 0 else dtype
        param = nn.Parameter(torch.ones(3, dtype=own or torch.float32))
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler = amp_core.GradScaler("cpu", 2.0**-20, process_group=dist.group.WORLD)
        scaler.scale(torch.ones(()))
        if own is not None:
            param.grad = torch.full_like(param, magnitude if own is torch.float64 else 1e37)
        if calls == "clip_grad_norm_":
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer, max_norm=1.0 if calls == "step" else None)
        scaler.update()
        found = scaler.last_step[optimizer].skipped, scaler.get_scale()
        each: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(each, found)
        assert each == [(True, 2.0**-21)] * len(each), (dtype, magnitude, calls, each)
