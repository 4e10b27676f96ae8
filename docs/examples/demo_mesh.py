"""Train a small Llama in float16 with FSDP2 and tensor parallelism; one plan has all dtypes.

torchrun --nproc-per-node 4 docs/examples/demo_mesh.py --dp 2 --tp 2
torchrun --nproc-per-node 1 docs/examples/demo_mesh.py
"""

from __future__ import annotations

import argparse
import math
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from amp_core import GradScaler, PrecisionPlan

PLAN = """
device_type = "cpu"

[distributed]
param_dtype = "float16"
reduce_dtype = "float32"
float32_buffers = ["**.angles"]
"""
WIDTH, HEAD, WORDS, LENGTH, SEQUENCES, MICRO_BATCHES = 32, 8, 64, 16, 8, 2


class Layer(nn.Module):
    """Attention with rotary positions and a gated MLP, each behind a norm."""

    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        speeds = 100.0 ** -torch.linspace(0, 1, HEAD // 2)
        self.register_buffer("angles", torch.outer(torch.arange(LENGTH), speeds))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` of shape (batch, length, width), changed."""
        normed = self.norm(x)
        # A tensor-parallel rank has some of the heads.
        q, k, v = (
            each(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        normed = self.norm_mlp(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))

    def turned(self, x: Tensor) -> Tensor:
        """Return `x` with its pairs of features rotated by their angles, in float32."""
        a, b = x.float().chunk(2, -1)
        cos, sin = self.angles.cos(), self.angles.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Llama(nn.Module):
    """Predicts the next word at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits for `words` of shape (batch, length)."""
        logits: Tensor = self.head(self.norm(self.layers(self.words(words))))
        return logits


# --8<-- [start:build]
def build(mesh: DeviceMesh, plan: PrecisionPlan) -> Llama:
    """Return the model, cut over the mesh as the plan says."""
    model = Llama()
    plan.apply(model)
    columns, rows = ("q", "k", "v", "gate", "up"), ("o", "down")
    styles = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], styles)
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh["dp"], mp_policy=plan.fsdp_policy(model, unit))
    return model


# --8<-- [end:build]


def train(args: argparse.Namespace) -> None:
    """Learn a few sequences by heart; rank 0 prints the losses."""
    mesh = init_device_mesh("cpu", (args.dp, args.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = build(mesh, PrecisionPlan.from_toml(PLAN))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", process_group=dist.group.WORLD)
    words = torch.randint(WORDS, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    mine = words.chunk(args.dp)[mesh.get_local_rank("dp")].chunk(MICRO_BATCHES)
    losses: list[float] = []
    for step in range(args.steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for number, batch in enumerate(mine, 1):
            model.set_requires_gradient_sync(number == MICRO_BATCHES)  # reduce once per step
            logits = model(batch[:, :-1]).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / MICRO_BATCHES
            scaler.scale(loss).backward()
            total += loss.detach()
        if step == args.overflow_at and dist.get_rank() == dist.get_world_size() - 1:
            parts = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
            parts[-1].view(-1)[0] = math.inf  # in the part of one rank
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        dist.all_reduce(total, group=mesh.get_group("dp"))
        losses.append(float(total) / args.dp)
    report(model, scaler, losses)


def report(model: Llama, scaler: GradScaler, losses: list[float]) -> None:
    """Print the losses; fail if ranks that share weights or the scale have drifted apart."""
    params = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    state = torch.cat([p.detach().flatten() for p in params])
    state = torch.cat([state, state.new_tensor([scaler.get_scale()])])
    everyone = [torch.empty_like(state) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, state)
    if not all(torch.equal(state, other) for other in everyone):
        raise SystemExit("the ranks hold different weights or scales")
    if dist.get_rank() == 0:
        print(f"scale {scaler.get_scale():g} losses {' '.join(f'{loss:.4f}' for loss in losses)}", flush=True)


def main() -> None:
    """Join the other ranks, train with them, and leave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dp", type=int, default=1, help="ranks with other sequences, and shards of the weights"
    )
    parser.add_argument("--tp", type=int, default=1, help="ranks with other heads and features")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--overflow-at", type=int, help="put an inf into the last rank's gradients in this step"
    )
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args)
    dist.barrier()  # no rank takes its connections down while another still uses them
    time.sleep(0.2)  # gloo's threads let go of the last tensors; the end would cross them (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
