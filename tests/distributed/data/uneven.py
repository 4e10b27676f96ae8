"""Ranks of which only one has gradients, or others than the rest: what `ranks.py` runs on two processes."""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import amp_core


def uneven() -> None:
    """What rank 0 alone finds decides on all ranks, and what none finds on none."""
    for early in (False, True):
        window_of_one_rank(early)
    for fused, max_norm in itertools.product((False, True), (None, 1.0, math.inf)):
        overflow_of_one_rank(fused, max_norm)
    for other in (None, torch.float32, torch.float16):
        overflow_of_one_dtype(other)
    for order in (1.0, 2.0, math.inf):
        norm_of_one_rank(order)
    for scale in (4.0, 0.5):
        norm_beyond_float16(scale)


def part_of_model(
    dtype: torch.dtype, scale: float, fused: bool = False
) -> tuple[nn.Parameter, torch.optim.Optimizer, amp_core.GradScaler]:
    param, world = nn.Parameter(torch.ones(3, dtype=dtype)), dist.group.WORLD
    scaler = amp_core.GradScaler(
        "cpu", scale, process_group=world, sharded_over={world: [param]}, allow_fp16_gradients=True
    )
    scaler.scale(torch.ones(()))
    return param, torch.optim.SGD([param], lr=1.0, fused=fused), scaler


def window_of_one_rank(early: bool) -> None:
    """A micro-batch is left out on rank 0; the other rank has no gradient, or one from before."""
    param, optimizer, scaler = part_of_model(torch.float32, 8.0)
    first = dist.get_rank() == 0
    if early and not first:
        scaler.scale(param.sum()).backward()
    with amp_core.AccumulationWindow(scaler, optimizer) as window:
        for factor in (1.0, math.inf, 1.0):
            with window.micro_batch():
                if first:
                    scaler.scale((param * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0, "the scales have parted"
    assert scaler.last_step[optimizer].bad_micro_batches == (1,)
    assert param.tolist() == [-2.0 if first else 0.0 if early else 1.0] * 3, param


def overflow_of_one_rank(fused: bool, max_norm: float | None) -> None:
    """Unscaled gradients leave float32 on rank 0; the other one has none."""
    param, optimizer, scaler = part_of_model(torch.float32, 0.0625, fused)
    param.grad = torch.full_like(param, 1e38) if dist.get_rank() == 0 else None
    scaler.step(optimizer, max_norm=max_norm)
    scaler.update()
    assert scaler.get_scale() == 0.03125, (fused, max_norm)
    assert param.tolist() == [1.0] * 3


def overflow_of_one_dtype(other: torch.dtype | None) -> None:
    """Unscaled gradients leave float16 on rank 0; those of the other one, if any, are wider or as wide."""
    first = dist.get_rank() == 0
    param, optimizer, scaler = part_of_model(torch.float16 if first or other is None else other, 0.0625)
    param.grad = None if other is None and not first else torch.full_like(param, 5000.0)
    scaler.clip_grad_norm_(optimizer, math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 0.03125, other
    assert param.tolist() == [1.0] * 3


def norm_of_one_rank(order: float) -> None:
    """The other rank has no gradient that it could count."""
    param, optimizer, scaler = part_of_model(torch.float32, 4.0)
    param.grad = torch.full_like(param, 8.0) if dist.get_rank() == 0 else None
    norm = float(scaler.clip_grad_norm_(optimizer, 1e9, order))
    assert math.isclose(norm, 2.0 * 3.0 ** (1 / order), rel_tol=1e-6), (order, norm)
    scaler.step(optimizer)
    assert scaler.landed(optimizer)
    scaler.update()


def norm_beyond_float16(scale: float) -> None:
    """Each gradient fits into float16, their norm does not."""
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.zeros(128, dtype=torch.float16), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.full((128,), 8192.0 * scale).half(), mesh, [Shard(0)])
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = amp_core.GradScaler("cpu", scale, allow_fp16_gradients=True)
    scaler.scale(torch.ones(()))
    assert float(scaler.clip_grad_norm_(optimizer, 1e6)) > 65504.0
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last_step[optimizer].skipped, "no scale is low enough, so every step is skipped"
    assert isinstance(param, DTensor)
    assert param.to_local().tolist() == [-8192.0] * 64
