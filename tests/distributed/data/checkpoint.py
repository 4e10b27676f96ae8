"""A run with every part that a checkpoint holds; run on each rank, it loads one, steps, and saves another."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import amp_core
from amp_core.formats import AmaxHistory, Delayed

RULE = amp_core.LossScaleSchedule(growth_interval=2, hysteresis=2)


class Run:
    def __init__(
        self,
        *,
        storage: str = "remainder",
        dtype: torch.dtype = torch.bfloat16,
        kind: type = torch.optim.AdamW,
        states: torch.dtype = torch.bfloat16,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).to(dtype)
        if dist.is_initialized():
            fully_shard(self.model)
        self.optimizer = kind(self.model.parameters(), lr=1e-2)
        self.masters = amp_core.master_weights(self.model, self.optimizer, storage, state_dtype=states)
        self.scaler = amp_core.GradScaler("cpu", 64.0, schedule=RULE, schedules={"g": RULE})
        self.history = AmaxHistory(Delayed(4), "cpu")
        self.steps = 0

    def step(self) -> None:
        """One row: gradients are outer products, whose bits no kernel can change; all ranks have the same."""
        self.steps += 1
        key = "g" if self.steps % 2 else None
        self.optimizer.zero_grad()
        inputs = torch.full((1, 6), 1.0 + self.steps, dtype=self.model[0].weight.dtype)
        loss = self.scaler.scale(self.model(inputs).float().sum(), key)
        (loss * torch.inf if self.steps == 3 else loss).backward()
        self.scaler.step(self.optimizer, key=key)
        self.scaler.update()
        self.history.record(inputs.amax())
        self.history.step()

    def parts(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "scaler": self.scaler, "history": self.history}

    def load(self, folder: Path) -> None:
        parts = self.parts()
        dcp.load(parts, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optim"]
        )

    def everything(self) -> dict[str, Any]:
        """Return the state as numbers, nothing of it sharded."""
        exact = {name: whole(value) for name, value in self.masters.float32_weights().items()}
        states = self.optimizer.state_dict()["state"]
        optimizer = {number: {k: whole(v) for k, v in states[number].items()} for number in sorted(states)}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        history = {name: whole(value) for name, value in self.history.state_dict().items()}
        scaler = self.scaler.state_dict()
        return {"exact": exact, "optim": optimizer, "groups": groups, "scaler": scaler, "history": history}


def check_full_states(run: Run) -> None:
    """Fail unless another run takes the full states, which the first rank has, and is then as `run`."""
    model, optimizer = get_state_dict(
        run.model, run.optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if dist.get_rank():
        model, optimizer = {}, {}
    again, told = Run(), StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(again.model, model, options=told)
    set_optimizer_state_dict(again.model, again.optimizer, optimizer, options=told)
    ours, theirs = again.everything(), run.everything()
    for part in ("exact", "optim"):
        assert ours[part] == theirs[part], part


def whole(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.tolist() if isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    dist.init_process_group("gloo")
    before, after = map(Path, sys.argv[1:])
    run = Run()
    run.load(before)
    run.steps = 4
    check_full_states(run)
    run.step()
    own = dist.new_group()  # a thread saves, and its collectives must not mix with those of the step
    saving = dcp.async_save(run.parts(), checkpoint_id=after, process_group=own)
    run.step()  # what is saved must not change any more
    saving.result()
    dist.barrier()
    os._exit(0)
