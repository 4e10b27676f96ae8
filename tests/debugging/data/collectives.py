"""What a recording of two ranks over gloo shows of FSDP2 with tensor parallelism, and of DDP."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import amp_core
from amp_core import AmpError, PrecisionPlan

PLAN = """
device_type = "cpu"
[distributed]
param_dtype = "bfloat16"
reduce_dtype = "{}"
activation_reduce_dtype = "float32"
state_dtype = "float32"
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def recorded(model: nn.Module, plan: PrecisionPlan) -> amp_core.Recording:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with amp_core.record(model, plan=plan) as r:
        model(torch.randn(2, 4, 8)).float().square().mean().backward()
        optimizer.step()
    return r


def kinds(r: amp_core.Recording) -> set[tuple[str, ...]]:
    return {(key.phase, key.kind, key.of, key.dtype) for key in r.collectives}


def sharded() -> None:
    """FSDP2 alone keeps to the plan."""
    model, plan = nn.Sequential(Block(), Block()), PrecisionPlan.from_toml(PLAN.format("float32"))
    for unit in (*model, model):
        fully_shard(unit, mp_policy=plan.fsdp_policy(model, unit))
    r = recorded(model, plan)
    assert kinds(r) == {
        ("forward", "all_gather", "weights", "bfloat16"),
        ("backward", "all_gather", "weights", "bfloat16"),
        ("backward", "reduce_scatter", "gradients", "float32"),
    }, kinds(r)
    r.check()
    assert not any("c10d" in key.kernel or "fsdp" in key.kernel for key in r.ops), r.ops
    names = {(key.kind, key.name, key.state, key.dtype) for key in r.tensors}
    assert ("optimizer state", "1.norm.weight", "exp_avg", "float32") in names, names
    assert ("gradient", "0.up.bias", "", "float32") in names, names
    narrow = PrecisionPlan(plan.policy, param_dtype=torch.float32, grad_dtype=torch.float16)
    assert {v.entry for v in r.violations(narrow)} == {"param_dtype"}


def tensor_parallel() -> None:
    """Torch reduces gradients over the tensor-parallel ranks in bfloat16 (pytorch#190626)."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    styles = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    plan = PrecisionPlan.from_toml(PLAN.format("float32"))
    model = parallelize_module(Block(), mesh["tp"], styles)
    fully_shard(model, mesh=mesh["dp"], mp_policy=plan.fsdp_policy())
    r = recorded(model, plan)
    (reduced,) = {key.dtype for key in r.collectives if (key.kind, key.of) == ("all_reduce", "gradients")}
    found = {(v.what, v.dtype, v.entry) for v in r.violations()}
    in_gradients = ("all_reduce of gradients", "bfloat16", "reduce_dtype")
    assert (in_gradients in found) == (reduced == "bfloat16"), (found, reduced)
    assert ("reduce_scatter of activations", "bfloat16", "activation_reduce_dtype") in found, found
    # What a hook on the result of a module sends belongs to the module around it.
    places = {(key.kind, key.place.module) for key in r.collectives if key.of == "activations"}
    assert places == {("all_gather", "up"), ("reduce_scatter", "")}, places
    try:
        r.check()
    except AmpError as error:
        assert "reduce_scatter of activations of (FSDPBlock) in the forward pass: bfloat16, but" in str(error)
    else:
        raise AssertionError("nothing was forbidden")
    assert "Forbidden by the plan" in str(r)
    assert "Collectives" in str(r)


def redistributed() -> None:
    """A collective inside of an op on DTensors: clipping sums shards up."""
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel())
    with amp_core.record() as r:
        model(torch.randn(2, 8)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    assert any(key.kind == "all_reduce" and key.of == "other" for key in r.collectives), r.collectives


def copied() -> None:
    """DDP, by itself and with the hook of a plan."""
    for dtype in ("float32", "bfloat16"):
        plan = PrecisionPlan.from_toml(PLAN.format(dtype))
        ddp = DistributedDataParallel(Block())
        ddp.register_comm_hook(None, plan.ddp_hook())
        r = recorded(ddp, plan)
        assert kinds(r) == {("backward", "all_reduce", "gradients", dtype)}, kinds(r)
        r.check()
    exact = PrecisionPlan.from_toml(PLAN.format("float32"))
    assert [v.what for v in r.violations(exact)] == ["all_reduce of gradients"]
    alone = Block()
    alone.load_state_dict(ddp.module.state_dict())
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    ddp.zero_grad()
    ddp(x).square().mean().backward()
    alone(x).square().mean().backward()
    for ours, mine in zip(ddp.parameters(), alone.parameters(), strict=True):
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine.grad)
        expected = sum(grad.to(torch.bfloat16).div_(2) for grad in both)
        torch.testing.assert_close(ours.grad, expected.float(), rtol=2**-7, atol=1e-6)


dist.init_process_group("gloo")
torch.manual_seed(0)
for scene in (sharded, tensor_parallel, redistributed, copied):
    scene()
dist.barrier()
print("all is well", flush=True)
os._exit(0)  # gloo's threads let go of tensors while the interpreter ends, and abort it (pytorch#190489)
