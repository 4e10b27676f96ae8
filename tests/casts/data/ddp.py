"""Two processes over gloo: gradients under each scope, accumulated with no_sync too, against plain DDP's."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import amp_core

dist.init_process_group("gloo")
rank = dist.get_rank()


def grads(ddp):
    ddp.zero_grad()
    with ddp.no_sync(), amp_core.autocast("cpu"):
        first = ddp(torch.full((4, 6), rank + 1.0)).float().square().mean()
    with ddp.no_sync():
        first.backward()
    with amp_core.autocast("cpu"):
        loss = ddp(torch.full((4, 6), rank - 0.5)).float().square().mean()
    loss.backward()
    return [p.grad.clone() for p in ddp.parameters()]


def compare(scope, *, find_unused):
    """Raise where gradients under `scope` are not plain DDP's, or differ between the ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3))
    ddp = DistributedDataParallel(model, find_unused_parameters=find_unused)
    expected = grads(ddp)
    with scope(ddp):
        with torch.no_grad(), amp_core.autocast("cpu"):
            ddp.module(torch.ones(4, 6))  # as in an evaluation
        for _ in range(2):
            got = grads(ddp)
            for ours, theirs in zip(got, expected, strict=True):
                assert torch.equal(ours, theirs), "not plain DDP's gradients"
    for grad in got:
        same = [torch.empty_like(grad) for _ in range(2)]
        dist.all_gather(same, grad)
        assert torch.equal(*same), "the ranks differ"


def stored(storage):
    """Raise where ranks that began with other weights, which DDP has replaced, have parted after a step."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    masters = amp_core.master_weights(model, optimizer, storage)
    ddp = DistributedDataParallel(model)
    for step in range(3):
        optimizer.zero_grad()
        ddp(torch.full((4, 6), step - rank / 2).bfloat16()).float().square().mean().backward()
        optimizer.step()
        for weight in masters.float32_weights().values():
            same = [torch.empty_like(weight) for _ in range(2)]
            dist.all_gather(same, weight)
            assert torch.equal(*same), "the ranks differ"


for storage in ("remainder", "kahan", "stochastic"):
    stored(storage)
for scope in (amp_core.cached_casts, amp_core.master_weights):
    for find_unused in (True, False):
        compare(scope, find_unused=find_unused)
        print(f"{scope.__name__} {find_unused}: same", flush=True)
dist.barrier()
os._exit(0)  # gloo's threads let go of tensors while the interpreter ends, and abort it (pytorch#190489)
