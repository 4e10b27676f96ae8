"""Two ranks accumulate; the last one goes in the second window: ``python lost_window.py WHERE``."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import amp_core


def main(where: str) -> None:
    """Train; tell the error."""
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp_core.GradScaler("cpu", 8.0, process_group=dist.group.WORLD)
    window = amp_core.AccumulationWindow(scaler, optimizer)
    try:
        for number in range(2):
            scaler.scale(model(torch.ones(1, 4)).sum()).backward()
            before = [p.grad.clone() for p in model.parameters()]
            with window:
                with window.micro_batch():
                    scaler.scale(model(torch.ones(1, 4)).sum() * 2).backward()
                    leave(number, "in the micro-batch", where)
                leave(number, "after it", where)
            scaler.step(optimizer)
            scaler.update()
    except amp_core.RankLostError as error:
        print(error, flush=True)
        torch.testing.assert_close([p.grad for p in model.parameters()], before, rtol=0, atol=0)


def leave(number: int, here: str, where: str) -> None:
    if number and dist.get_rank() == 1 and here == where:
        os._exit(7)


if __name__ == "__main__":
    main(sys.argv[1])
