"""One process over gloo: weights that a wrapper takes away and gathers again, and weights in pieces."""

import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import amp_core

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1,))
how, scope = sys.argv[1], getattr(amp_core, sys.argv[2])


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    if how == "tensors":
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": ColwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=how == "reshard")
    return model


def trained(model):
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.5), torch.randn(4, 64)
    for _ in range(4):
        optimizer.zero_grad()
        with amp_core.autocast("cpu"):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
    return [p.detach().full_tensor() for p in model.parameters()]


expected, model = trained(make()), make()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    handle = scope(model)
assert [str(w.message)[:36] for w in caught] == ["4 weights, starting with '0.weight',"], caught
assert caught[0].filename == __file__
with handle:
    for ours, theirs in zip(trained(model), expected, strict=True):
        assert torch.equal(ours, theirs), "a stale cast was used"
    assert handle.nbytes() == 0
print("same", flush=True)
os._exit(0)  # gloo's threads let go of tensors while the interpreter ends, and abort it (pytorch#190489)
