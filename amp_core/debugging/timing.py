"""Time functions against each other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch


def interleaved(runs: Sequence[Callable[[], None]], seconds: float, device_type: str) -> list[float]:
    """Return the shortest time of each function, all run in turn for about `seconds` each."""
    best = [math.inf] * len(runs)
    end = time.perf_counter() + seconds * len(runs)
    for count in range(30):
        for index, run in enumerate(runs):
            took = _time(run, device_type)
            if count:  # the first run is slower
                best[index] = min(best[index], took)
        if count >= 5 and time.perf_counter() > end:
            break
    return best


def _time(run: Callable[[], None], device_type: str) -> float:
    _wait(device_type)
    start = time.perf_counter()
    run()
    _wait(device_type)
    return time.perf_counter() - start


def _wait(device_type: str) -> None:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == device_type:
        # Every device can be read, which waits; not every one has streams to synchronize.
        torch.zeros((), device=device_type).item()
