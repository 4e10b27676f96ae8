"""FSDP2 over gloo: prints a hash of the trained weights, which must not depend on the number of ranks."""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import amp_core

dist.init_process_group("gloo")
storage, how = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).to(torch.bfloat16)
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=how == "fused")
masters = amp_core.master_weights(model, optimizer, storage, state_dtype=torch.bfloat16, lost_updates=True)
for step in range(4):
    optimizer.zero_grad()
    # One row: gradients are outer products, whose bits no kernel can change; all ranks have the same.
    model(torch.full((1, 6), 1.0 + step, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
kept = [p.full_tensor().view(torch.int16).flatten() for p in model.parameters()]
exact = [p.full_tensor().view(torch.int32).flatten() for p in masters.float32_weights().values()]
assert len(masters.lost_updates()) == 4
if dist.get_rank() == 0:
    print(hashlib.sha256(repr([torch.cat(t).tolist() for t in (kept, exact)]).encode()).hexdigest())
dist.destroy_process_group()
