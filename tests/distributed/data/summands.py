"""Gradients of which each rank has a summand, as under sequence parallelism: a scene of `ranks.py`."""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import amp_core

STEPS, OVERFLOW = 3, 1


def net(*, parallel: bool) -> nn.Sequential:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.LayerNorm(6), nn.LayerNorm(6))
    if parallel:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(whole, mesh, {"*": SequenceParallel(sequence_dim=0)})
    return whole


def trained(model: nn.Sequential, fused: bool, clip: str) -> tuple[list, list]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler, last = amp_core.GradScaler("cpu", 1024.0), dist.get_world_size() - 1
    target = torch.randn(4 + 4 * last, 6, generator=torch.Generator().manual_seed(1))
    for number in range(STEPS):
        optimizer.zero_grad()
        tokens, weight = target.cumsum(1), model[0].weight
        if isinstance(weight, DTensor):
            out = model(distribute_tensor(tokens, weight.device_mesh, [Shard(0)])).full_tensor()
        else:
            out = model(tokens)
        scaler.scale((out - target).square().mean()).backward()
        grad = weight.grad
        whole = not isinstance(grad, DTensor)
        assert whole or isinstance(grad.placements[0], Partial)
        if number == OVERFLOW and (whole or dist.get_rank() == last):
            (grad if whole else grad.to_local())[0] = math.inf
        if clip == "by hand":
            scaler.clip_grad_norm_(optimizer, 0.01)
        scaler.step(optimizer, max_norm=0.01 if clip == "in the step" else None)
        assert bool(scaler.landed()) == (number != OVERFLOW)
        scaler.update()
    return [record.total_norm for record in scaler.history], list(model.parameters())


def summands() -> None:
    """The weights are those of one process that has all tokens, and an inf in one summand skips the step."""
    for fused, clip in itertools.product((False, True), ("not", "by hand", "in the step")):
        norms, ours = trained(net(parallel=True), fused, clip)
        expected, theirs = trained(net(parallel=False), fused, clip)
        torch.testing.assert_close(norms, expected)
        torch.testing.assert_close([p.full_tensor() for p in ours], theirs)
