"""Two ranks accumulate; the last one goes in the second window: ``python lost_window.py``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import amp_core


def main() -> None:
    """Train; tell the error."""
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp_core.GradScaler("cpu", 8.0, process_group=dist.group.WORLD)
    window = amp_core.AccumulationWindow(scaler, optimizer)
    try:
        for number in range(2):
            with window, window.micro_batch():
                scaler.scale(model(torch.ones(1, 4)).sum()).backward()
                if number and dist.get_rank() == 1:
                    os._exit(7)
            scaler.step(optimizer)
            scaler.update()
    except amp_core.RankLostError as error:
        print(error, flush=True)


if __name__ == "__main__":
    main()
