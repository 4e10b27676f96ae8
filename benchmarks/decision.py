"""``python -m benchmarks.decision``: what one decision of all ranks adds to a step of a small model.

Each rank trains one GPT under DistributedDataParallel, in float32. Steps without a scaler alternate with
steps by a `GradScaler` whose ranks agree, in pairs of random order. A figure is the ratio of the lower
quartiles of both kinds of step, which other work on the machine moves least, as a mean over the ranks. CPU
time is that of all threads of the process. No scaler on either side shows how exact the figures are. The
limit is what any decision takes: one pass of torch over the gradients, and one collective of two numbers.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_core import GradScaler
from benchmarks import machine
from benchmarks.curves import GPT, batches

CLIP = 1.0
WARM_UP = 5


class Arm:
    """One way to take a step, with a model and an optimizer of its own."""

    def __init__(self, *, scaled: bool = False, clipped: bool = False, limit: bool = False) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(GPT())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.scaler = GradScaler("cpu", 1024.0, process_group=dist.group.WORLD) if scaled else None
        self.max_norm = CLIP if clipped else None
        self.limit = limit

    def step(self, batch: Tensor) -> None:
        """Take one step."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer, max_norm=self.max_norm)
            self.scaler.update()
            return
        loss.backward()
        if self.limit:
            grads = [p.grad.view(-1) for p in self.model.parameters() if p.grad is not None]
            squares = torch.stack([torch.dot(grad, grad) for grad in grads])
            dist.all_reduce(torch.stack([squares.sum(), squares.isfinite().all().float()]))
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()


def seconds(arm: Arm, batch: Tensor) -> tuple[float, float]:
    """Return wall and CPU seconds of one step."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    arm.step(batch)
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(first: Arm, second: Arm, pairs: int) -> tuple[float, float]:
    """Return the ratios, second to first, of wall and CPU time: means over the ranks."""
    order = random.Random(0)
    took: dict[int, list[tuple[float, float]]] = {id(first): [], id(second): []}
    for number, batch in zip(range(WARM_UP + pairs), batches(), strict=False):
        for arm in [first, second] if order.random() < 0.5 else [second, first]:
            spent = seconds(arm, batch)
            if number >= WARM_UP:
                took[id(arm)].append(spent)
    quick = [
        [statistics.quantiles(kind)[0] for kind in zip(*took[id(arm)], strict=True)]
        for arm in (first, second)
    ]
    ratios = torch.tensor(quick[1]) / torch.tensor(quick[0])
    dist.all_reduce(ratios)
    wall, cpu = (ratios / dist.get_world_size()).tolist()
    return wall, cpu


def run(rank: int, ranks: int, pairs: int, port: int) -> None:
    """Measure on one rank; the first prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    cases: dict[str, Callable[[], tuple[Arm, Arm]]] = {
        "no scaler on either side": lambda: (Arm(), Arm()),
        "a scaler": lambda: (Arm(), Arm(scaled=True)),
        "the limit": lambda: (Arm(), Arm(limit=True)),
        "a scaler, both clip": lambda: (Arm(clipped=True), Arm(scaled=True, clipped=True)),
    }
    for name, arms in cases.items():
        wall, cpu = compare(*arms(), pairs)
        if rank == 0:
            print(f"{name:26}  wall {wall:.3f}  CPU {cpu:.3f}", flush=True)
    dist.barrier()
    time.sleep(0.2)
    os._exit(0)  # gloo's threads may abort an interpreter that ends (pytorch#190489)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decision", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=100)
    args = parser.parse_args()
    machine.refuse_a_mixture()
    cpu = f"{machine.model()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{args.ranks} ranks, {cpu}, torch {torch.__version__}", flush=True)
    port = random.SystemRandom().randrange(20000, 60000)
    mp.start_processes(run, (args.ranks, args.pairs, port), nprocs=args.ranks, start_method="fork")


if __name__ == "__main__":
    main()
