"""Processes over gloo: weights that a wrapper takes away and gathers again, and weights in pieces."""

import os
import sys
import warnings
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import amp_core

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
how, scope = sys.argv[1], getattr(amp_core, sys.argv[2])


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    if how == "tensors":
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=how == "reshard")
    return model


def trained(model):
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.5), torch.randn(4, 64)
    for _ in range(4):
        optimizer.zero_grad()
        for part in x.chunk(2):
            with amp_core.autocast("cpu"):
                loss = model(part).float().square().mean()
            loss.backward()
        optimizer.step()
    return [p.detach().full_tensor() for p in model.parameters()]


expected, model = trained(make()), make()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    handle = scope(model)
covered = how == "tensors" and scope is amp_core.cached_casts
if not covered:
    assert ["This scope leaves 4 weights" in str(w.message) for w in caught] == [True], caught
    assert caught[0].filename == __file__
else:
    assert not caught, caught
with handle:
    with amp_core.record(model) as r:
        result = trained(model)
    for ours, theirs in zip(result, expected, strict=True):
        assert torch.equal(ours, theirs), "a stale cast was used"
    assert covered or handle.nbytes() == 0
    casts = Counter()
    for key, count in r.casts.items():
        casts[key.weight] += count.calls * (key.phase == "forward")
    if covered:  # once per step, not once per micro-batch
        assert {casts[name] for name, _ in model.named_parameters()} == {4}, casts
        with torch.no_grad(), amp_core.autocast("cpu"):
            before = model(torch.ones(1, 64))
            assert handle.nbytes() >= 2 * sum(p.to_local().numel() for p in model.parameters())
            model[0].weight.to_local().mul_(2)  # a write to this rank's part
            assert not torch.equal(model(torch.ones(1, 64)), before), "a stale cast was used"
if covered:
    with torch.no_grad(), scope(model, debug=True), amp_core.autocast("cpu"):
        model(torch.ones(1, 64))
        model[0].weight.to_local().data.mul_(2)
        try:
            model(torch.ones(1, 64))
        except amp_core.StaleCastError as error:
            assert "'0.weight'" in str(error)
        else:
            raise AssertionError("a stale cast was not found")
print("same", flush=True)
os._exit(0)  # gloo's threads let go of tensors while the interpreter ends, and abort it (pytorch#190489)
