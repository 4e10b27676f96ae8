"""Real torchtitan on processes of gloo: imports it once, then forks the ranks of each scene.

``python titan.py FOLDER``; each rank writes what it saw to ``FOLDER/<scene>.<rank>.json``.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

# torchtitan asks its device for these, and for gloo it lacks a setting: it is not made for the CPU.
ON_CPU = {
    "current_device": lambda: 0,
    "empty_cache": lambda: None,
    "get_device_name": lambda _=None: "CPU",
    "get_device_properties": lambda _=None: SimpleNamespace(total_memory=1 << 30),
    "memory_stats": lambda _=None: {},
    "reset_peak_memory_stats": lambda: None,
}
for name, function in ON_CPU.items():
    setattr(torch.cpu, name, function)
torch._utils._get_available_device_type = lambda: "cpu"
if not hasattr(dist, "set_timeout"):  # before torch 2.15
    dist.set_timeout = lambda *_: None

import torchtitan.trainer
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import config_registry

from amp_core import GradScaler, PrecisionPlan
from amp_core.integrations.torchtitan import Trainer

SEQUENCES, STEPS, OVERFLOW = 8, 4, 2
PLAN = 'device_type = "cpu"\n[distributed]\nparam_dtype = "float16"\nreduce_dtype = "float32"\n'


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any) -> list[int]:
        return []

    def decode(self, *_: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 64


class Loader(BaseDataLoader):
    """The same few sequences in each step."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        words = torch.randint(64, (SEQUENCES, seq_len + 1), generator=torch.Generator().manual_seed(1))
        self.batches = words.chunk(dp_world_size)[dp_rank].split(local_batch_size)

    def __iter__(self) -> Iterator[Any]:
        while True:
            for batch in self.batches:
                yield {"input": batch[:, :-1].contiguous()}, batch[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def config(*, tp: int = 1, pp: int = 1, chunked: bool = False) -> torchtitan.trainer.Trainer.Config:
    """Return torchtitan's debug model of two layers, with attention that the CPU has."""
    made = config_registry.llama3_debugmodel()
    made.model_spec.model.layers[:] = made.model_spec.model.layers[:2]
    for layer in made.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if not chunked:
        made.loss = made.loss.loss_fn
    made.tokenizer, made.dataloader = Tokenizer.Config(), Loader.Config()
    made.optimizer.implementation = "for-loop"
    made.validator.enable = made.checkpoint.enable = False
    made.activation_checkpoint = None
    training, parallelism = made.training, made.parallelism
    training.steps, training.seq_len, training.disable_cuda_graphs = STEPS, 16, True
    training.mixed_precision_param = "float32"
    training.local_batch_size = SEQUENCES * tp * pp // dist_size()
    parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree = tp, pp
    parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_microbatch_size = "1F1B", 2
    parallelism.spmd_backend = "partial_dtensor"
    return made


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


class Spoiled(Trainer):
    """Puts an inf into the gradients of the last rank in one step."""

    def _clip(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        if self.step == OVERFLOW and dist.get_rank() == dist_size() - 1:
            local([p.grad for p in params if p.grad is not None][-1]).view(-1)[0] = torch.inf
        return super()._clip(params, *args, **kwargs)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(trainer: torchtitan.trainer.Trainer, folder: Path) -> dict[str, Any]:
    """Train from the first scene's weights; return what the rank saw."""
    weights = {name: p for part in trainer.model_parts for name, p in part.named_parameters()}
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    if (folder / "weights").exists():
        dcp.load(weights, checkpoint_id=folder / "weights")
    else:
        dcp.save(weights, checkpoint_id=folder / "weights")
    seen: list[tuple[float, float]] = []
    trainer.metrics_processor.log = lambda step, loss, largest, norm, **_: seen.append((loss, norm))
    trainer.train()
    scaler = getattr(trainer, "scaler", GradScaler("cpu", enabled=False))
    state = trainer.state_dict()
    trainer.load_state_dict(state)
    return {
        "losses": [loss for loss, _ in seen],
        "norms": [norm for _, norm in seen],
        "skipped": [record.skipped for record in scaler.history],
        "scale": scaler.get_scale(),
        "rates": trainer.lr_schedulers.state_dict()["last_epoch"],
        "step": state["step"],
        "last": sum(
            float(p.full_tensor().double().sum()) for p in weights.values() if isinstance(p, DTensor)
        ),
    }


def plain(folder: Path) -> dict[str, Any]:
    return trained(config().build(), folder)


def disabled(folder: Path) -> dict[str, Any]:
    return trained(Spoiled(config()), folder)


def mesh(folder: Path) -> dict[str, Any]:
    return trained(Spoiled(config(tp=2, chunked=True), plan=PrecisionPlan.from_toml(PLAN)), folder)


def pipeline(folder: Path) -> dict[str, Any]:
    trainer = Spoiled(config(pp=2), plan=PrecisionPlan.from_toml(PLAN))
    step = trainer.pp_schedule.step
    if (
        "arg_mbs" not in inspect.signature(step).parameters
    ):  # before torch 2.15, schedules cut batches themselves

        def of_whole_batch(*, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, **kwargs: Any) -> Any:
            assert not any(kwarg_mbs)
            whole = [torch.cat(column) for column in zip(*(arg_mbs or []), strict=True)]
            target = None if target_mbs is None else torch.cat(target_mbs)
            return step(*whole, target=target, **kwargs)

        trainer.pp_schedule.step = of_whole_batch
    return trained(trainer, folder)


def refused(folder: Path) -> dict[str, Any]:
    graphs = config()
    graphs.training.disable_cuda_graphs = False
    plan = PrecisionPlan.from_toml(PLAN)
    rules = PrecisionPlan.from_toml('device_type = "cpu"\n[rules]\nsoftmax = "lower_precision_fp"\n')
    cases = [(graphs, None), (config(), replace(plan, output_dtype=torch.float32)), (config(), rules)]
    said = []
    for made, with_plan in cases:
        try:
            Trainer(made, plan=with_plan)
        except ValueError as error:
            said.append(str(error))
    with mock.patch("amp_core.integrations.torchtitan.version", return_value="0.4.0"):
        try:
            Trainer(config())
        except RuntimeError as error:
            said.append(str(error))
    return {"said": said}


SCENES = {"plain": 1, "disabled": 1, "mesh": 4, "pipeline": 4, "refused": 1}


def rank_of(scene: str, rank: int, port: int, folder: Path) -> None:
    """Run one rank in this process."""
    settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": SCENES[scene], "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in settings.items()}, MASTER_ADDR="127.0.0.1")
    result = globals()[scene](folder)
    (folder / f"{scene}.{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()


def main(folder: Path) -> None:
    """Run the scenes in turn."""
    for scene, count in SCENES.items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(count):
            child = os.fork()
            if not child:
                try:
                    rank_of(scene, rank, port, folder)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        failed = [child for child in children if os.waitpid(child, 0)[1]]
        if failed:
            sys.exit(f"a rank of {scene} failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
