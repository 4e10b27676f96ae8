"""Ranks with other numbers of batches, under torch's Join: what `ranks.py` runs on two processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import amp_core


def joined() -> None:
    """Ranks take scale and moments from the one that stepped the most, and stay together after that."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = amp_core.GradScaler("cpu", growth_interval=2)
    rank = dist.get_rank()
    for epoch in range(2):
        steps = 0
        with Join([model]):
            for _ in range(5 + 4 * rank):
                with amp_core.autocast("cpu", torch.float16):
                    loss = model(torch.ones(2, 4) + rank).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                steps += 1
                if steps == 5:
                    after = model.module.weight.tolist(), scaler.get_scale()
        first, second = of_ranks(after)
        assert first == second, epoch
        if epoch == 0:
            assert len({*of_ranks(scaler.get_scale())}) == 2, "nothing to hand on"
        mine = steps, scaler.state_dict(), optimizer.state_dict()
        _, scale, moments = max(of_ranks(mine), key=lambda other: other[0])
        scaler.load_state_dict(scale)
        optimizer.load_state_dict(moments)


def of_ranks(mine: Any) -> list[Any]:
    every = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every
