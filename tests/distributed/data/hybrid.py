"""Copies of a model that FSDP1 shards: what `ranks.py` runs on four processes."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import amp_core


def hybrid() -> None:
    """The norm counts each copy, or only the pieces of one rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for order in (1.0, 2.0, math.inf):
        for original in (True, False):
            for wide in (True, False):
                norm_of_one_copy(mesh, order, original, wide)


def norm_of_one_copy(mesh: dist.DeviceMesh, order: float, original: bool, wide: bool) -> None:
    torch.manual_seed(0)
    net = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5)),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh,
        use_orig_params=original,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ranks = {"process_group": net.process_group}
    if wide:
        over = {net.process_group: net.parameters()}
        ranks = {"process_group": dist.group.WORLD, "sharded_over": over}
    scaler = amp_core.GradScaler("cpu", 64.0, **ranks)
    for factor in (1.0, math.inf):
        optimizer.zero_grad()
        inputs = torch.full((4, 6), 1.0 + dist.get_rank())
        loss = net(inputs).square().mean() * (factor if dist.get_rank() == 3 else 1.0)
        scaler.scale(loss).backward()
        norm = float(scaler.clip_grad_norm_(optimizer, 1e9, order))
        if math.isfinite(factor):
            wanted = float(net.clip_grad_norm_(1e9, order))
            assert math.isclose(norm, wanted, rel_tol=1e-5), (order, original, wide, norm, wanted)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step[optimizer].skipped == math.isinf(factor)
