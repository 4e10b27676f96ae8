"""Record and compare a model under DDP and FSDP2, in one process over gloo. For test_record.py."""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import amp_core

x = torch.randn(4, 8)


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))


def recorded(model: nn.Module) -> set[tuple[str, str]]:
    with amp_core.record() as r:
        with amp_core.autocast("cpu"):
            loss = model(x).float().square().mean()
        loss.backward()
    return {(k.place.module, k.dtypes) for k in r.ops if k.op == "aten::linear.default"}


with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    whole = DistributedDataParallel(make())
    assert recorded(whole) == {("module.0", "bfloat16"), ("module.2", "bfloat16")}
    c = amp_core.compare(lambda: whole(x).square().mean(), "cpu")
    assert 0 < c.gradient_error < 0.1

    sharded = fully_shard(make(), mesh=init_device_mesh("cpu", (1,)))
    assert recorded(sharded) == {("0", "bfloat16"), ("2", "bfloat16")}
    c = amp_core.compare(lambda: sharded(x).square().mean(), "cpu")
    assert 0 < c.gradient_error < 0.1
    dist.destroy_process_group()

os._exit(0)  # gloo's threads let go of tensors while the interpreter ends, and abort it (pytorch#190489)
