"""FSDP2 over gloo: prints a hash of what each storage trained, the same for any number of ranks."""

import hashlib
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import amp_core


def trained(storage, how):
    """Return the bits of the stored and of the exact weights after four steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).to(torch.bfloat16)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=how == "fused")
    masters = amp_core.master_weights(
        model, optimizer, storage, state_dtype=torch.bfloat16, lost_updates=True
    )
    for step in range(4):
        optimizer.zero_grad()
        # One row: gradients are outer products, whose bits no kernel can change; all ranks have the same.
        model(torch.full((1, 6), 1.0 + step, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
    assert len(masters.lost_updates()) == 4
    kept = [p.full_tensor().view(torch.int16).flatten() for p in model.parameters()]
    exact = [p.full_tensor().view(torch.int32).flatten() for p in masters.float32_weights().values()]
    return [torch.cat(bits).tolist() for bits in (kept, exact)]


def on_the_first_rank():
    """Return the bits of a weight that is on a mesh of one rank, which the others are outside of."""
    torch.manual_seed(0)
    first, model = DeviceMesh("cpu", [0]), nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.randn(4, 6).bfloat16(), first, [Shard(0)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp_core.master_weights(model, optimizer, "stochastic", state_dtype=torch.bfloat16)
    for step in range(4):
        grad = torch.full((4, 6), 1.0 + step, dtype=torch.bfloat16)
        model.weight.grad = distribute_tensor(grad, first, [Shard(0)])
        optimizer.step()
    return model.weight.to_local().view(torch.int16).tolist()


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for storage, how in itertools.product(("remainder", "stochastic", "kahan"), ("fused", "plain")):
    weights = trained(storage, how)
    if dist.get_rank() == 0:
        print(storage, how, hashlib.sha256(repr(weights).encode()).hexdigest())
weight = on_the_first_rank()
if dist.get_rank() == 0:
    print("on the first rank", hashlib.sha256(repr(weight).encode()).hexdigest())
dist.destroy_process_group()
