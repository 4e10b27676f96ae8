"""Train a small Llama of transformers in float16 on a mesh of pipeline, data and tensor parallelism.

torchrun --nproc-per-node 4 docs/examples/demo_mesh.py --dp 2 --tp 2
torchrun --nproc-per-node 4 docs/examples/demo_mesh.py --pp 2 --dp 2
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from amp_core import GradScaler, PrecisionPlan

PLAN = """
device_type = "cpu"

[distributed]
param_dtype = "float16"
reduce_dtype = "float32"
float32_buffers = ["**.inv_freq"]
"""
WORDS, LENGTH, SEQUENCES, MICRO_BATCHES = 64, 16, 8, 2
SIZES = LlamaConfig(
    vocab_size=WORDS,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
)


# --8<-- [start:build]
class Stage(nn.Module):
    """The layers of a Llama that one stage of the pipeline has."""

    def __init__(self, llama: LlamaForCausalLM, number: int, stages: int) -> None:
        super().__init__()
        whole, count = llama.model, len(llama.model.layers) // stages
        self.words = whole.embed_tokens if number == 0 else nn.Identity()
        self.angles = whole.rotary_emb
        self.layers = nn.ModuleList(whole.layers[number * count :][:count])
        self.head = nn.Sequential(whole.norm, llama.lm_head) if number == stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, or what the next stage takes, for words or what the stage before returned."""
        x = self.words(x)
        angles = self.angles(x, torch.arange(LENGTH)[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=angles)
        out: Tensor = self.head(x)
        return out


def build(mesh: DeviceMesh, plan: PrecisionPlan) -> Stage:
    """Return this rank's part of the model, cut over the mesh as the plan says."""
    torch.manual_seed(0)  # all ranks begin with the same Llama
    stage = Stage(LlamaForCausalLM(SIZES), mesh.get_local_rank("pp"), mesh["pp"].size())
    plan.apply(stage)
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    styles = {f"*.{name}": ColwiseParallel() for name in columns} | {
        f"*.{name}": RowwiseParallel() for name in rows
    }
    for layer in stage.layers:
        parallelize_module(layer, mesh["tp"], styles)
    for unit in (*stage.layers, stage):
        fully_shard(unit, mesh=mesh["dp"], mp_policy=plan.fsdp_policy(stage, unit))
    return stage


def new_scaler(mesh: DeviceMesh, stage: Stage) -> GradScaler:
    """Return a scaler by which all ranks decide as one, though each stage has parameters of its own."""
    scaler = GradScaler(
        "cpu", process_group=dist.group.WORLD, sharded_over={mesh["pp"]: stage.parameters()}, history=10
    )
    # Only the last stage has a loss, but each needs the scale, on its device.
    scaler.scale(torch.zeros((), device="cpu"))
    return scaler


# --8<-- [end:build]


class Training:
    """Learns a few sequences by heart."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.mesh = init_device_mesh("cpu", (args.pp, args.dp, args.tp), mesh_dim_names=("pp", "dp", "tp"))
        self.stage = build(self.mesh, PrecisionPlan.from_toml(PLAN))
        self.scaler = new_scaler(self.mesh, self.stage)
        self.optimizer = torch.optim.AdamW(self.stage.parameters(), lr=0.01)
        words = torch.randint(WORDS, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
        self.words = words.chunk(args.dp)[self.mesh.get_local_rank("dp")]
        self.schedule = None
        number = self.mesh.get_local_rank("pp")
        self.first, self.last = number == 0, number == args.pp - 1
        if args.pp > 1:
            piped = PipelineStage(
                self.stage, number, args.pp, torch.device("cpu"), group=self.mesh.get_group("pp")
            )
            self.schedule = Schedule1F1B(piped, MICRO_BATCHES, self.scaled_loss, scale_grads=False)

    def scaled_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the scaled loss of a micro-batch."""
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        scaled: Tensor = self.scaler.scale(loss / MICRO_BATCHES)
        return scaled

    def backward(self) -> Tensor:
        """Accumulate gradients over micro-batches; return the loss, on stages before the last 0."""
        inputs, targets = self.words[:, :-1], self.words[:, 1:]
        losses: list[Tensor] = []
        if self.schedule is not None:
            self.schedule.step(*[inputs] * self.first, target=targets if self.last else None, losses=losses)
        else:
            pairs = zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True)
            for number, (some, theirs) in enumerate(pairs, 1):
                self.stage.set_requires_gradient_sync(number == MICRO_BATCHES)  # reduce once per step
                losses.append(self.scaled_loss(self.stage(some), theirs))
                losses[-1].backward()
        return sum(losses, torch.zeros(())).detach() / self.scaler.get_scale()

    def step(self, overflow: bool) -> float:
        """Take a step, or skip it; return the loss of all ranks."""
        self.optimizer.zero_grad()
        total = self.backward() * self.mesh["pp"].size() / dist.get_world_size()
        if overflow:
            parts = [p.grad.to_local() for p in self.stage.parameters() if p.grad is not None]
            parts[-1].view(-1)[0] = math.inf  # in the part of one rank
        self.scaler.step(self.optimizer, max_norm=1.0)
        self.scaler.update()
        dist.all_reduce(total)
        return float(total)

    def check(self) -> None:
        """Fail if ranks that share weights or the scale have drifted apart."""
        params = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.stage.parameters()]
        same = {"pp": torch.tensor([self.scaler.get_scale()])}  # by stages, the weights differ
        same["dp"] = same["tp"] = torch.cat([p.detach().flatten() for p in params])
        for name, mine in same.items():
            theirs = [torch.empty_like(mine) for _ in range(self.mesh[name].size())]
            dist.all_gather(theirs, mine, group=self.mesh.get_group(name))
            if not all(torch.equal(mine, other) for other in theirs):
                raise SystemExit(f"the ranks of {name} hold different weights or scales")


def main() -> None:
    """Join the other ranks, train with them, and leave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pp", type=int, default=1, help="ranks with other layers")
    parser.add_argument("--dp", type=int, default=1, help="ranks with other sequences, and shards of weights")
    parser.add_argument("--tp", type=int, default=1, help="ranks with other heads and features")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--overflow-at", type=int, help="put an inf into the last rank's gradients there")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    training, last = Training(args), dist.get_rank() == dist.get_world_size() - 1
    losses = [training.step(last and step == args.overflow_at) for step in range(args.steps)]
    training.check()
    if last:
        scale = training.scaler.get_scale()
        print(f"scale {scale:g} losses {' '.join(f'{loss:.4f}' for loss in losses)}", flush=True)
    dist.barrier()  # no rank takes its connections down while another still uses them
    time.sleep(0.2)  # gloo's threads let go of the last tensors; the end would cross them (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
