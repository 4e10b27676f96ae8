"""What a rank does in the tests of ranks that are lost: trains, saves after each step, may die or resume.

``python lost.py FOLDER [PHASE | --resume STEP]``
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import amp_core

STEPS, LOST_AT = 4, 2


class Run:
    """A small sharded model that trains in float16."""

    def __init__(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        for unit in (self.model[0], self.model[2], self.model):
            fully_shard(unit)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = amp_core.GradScaler("cpu", 2.0**10, growth_interval=1, process_group=group)

    def parts(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler}

    def load(self, step: int) -> None:
        parts = self.parts()
        dcp.load(parts, checkpoint_id=self.folder / str(step))
        set_state_dict(
            self.model, self.optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
        )

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        with amp_core.autocast("cpu", dtype=torch.float16):
            loss = self.model(x).float().square().mean()
        self.scaler.scale(loss if number else loss * torch.inf).backward()
        self.scaler.step(self.optimizer, max_norm=0.1)
        self.scaler.update()
        dcp.save(self.parts(), checkpoint_id=self.folder / str(number))

    def hang(self, *_: Any, **__: Any) -> None:
        while not (self.folder / "ended").exists():
            time.sleep(0.1)
        os._exit(7)

    def lose(self, phase: str) -> None:
        """Let the last rank go in this phase of the next step."""
        if dist.get_rank() != dist.get_world_size() - 1:
            return
        leave, scaler = (lambda *_, **__: os._exit(7)), self.scaler
        if phase == "forward":
            self.model[2].register_forward_pre_hook(leave)
        elif phase == "backward":
            self.model[1].register_full_backward_hook(leave)
        elif phase == "decision":
            scaler.step = leave
        elif phase == "hang":
            scaler.step = self.hang
        elif phase == "save":
            scaler.state_dict = leave


def state(run: Run) -> list[Any]:
    """Everything that this rank has, bit for bit."""
    local = [p.to_local().clone() for p in run.model.parameters()]
    moments = [each for of_one in run.optimizer.state.values() for each in of_one.values()]
    return [
        *local,
        *(m.to_local() if isinstance(m, DTensor) else m for m in moments),
        run.scaler.state_dict(),
    ]


def main(folder: str, *options: str) -> None:
    """Train; tell what happened."""
    dist.init_process_group("gloo")
    wait = timedelta(seconds=8 if "hang" in options else 240)
    run, first = Run(Path(folder), dist.new_group(timeout=wait)), 0
    if options[:1] == ("--resume",):
        first = int(options[1])
        run.load(first - 1)
    for number in range(first, STEPS):
        if number == LOST_AT and first == 0 and options:
            run.lose(options[0])
            lost(run, number)
            return
        run.step(number)
    torch.save(state(run), Path(folder, f"end.{bool(first)}.{dist.get_rank()}"))
    print("skipped", [record.skipped for record in run.scaler.history], flush=True)
    dist.barrier()


def lost(run: Run, number: int) -> None:
    """Take the step in which another rank goes; tell the error."""
    try:
        run.step(number)
    except Exception as error:
        ranks = error.ranks if isinstance(error, amp_core.RankLostError) else None
        print(type(error).__name__, ranks, str(error).replace("\n", " "), flush=True)
    else:
        print("no error", flush=True)
    (run.folder / "ended").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
