"""The benchmarks of accelerators, whose work goes on after the host has returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from benchmarks.ab import Ratio, compare

Call = Callable[[], object]


def compare_on(
    device: str,
    name: str,
    theirs: Call,
    ours: Call,
    *,
    calls: int,
    rounds: int = 15,
    scope: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Ratio:
    """Time `calls` calls and the wait for the last, ours in a `scope`; seconds are those of one call."""
    wait = torch.get_device_module(device).synchronize

    def many(side: Call, scope: Callable[[], AbstractContextManager[object]]) -> Call:
        def run() -> None:
            with scope():
                for _ in range(calls):
                    side()
                wait()

        return run

    found = compare(name, many(theirs, nullcontext), many(ours, scope), rounds=rounds, before=wait)
    return Ratio(name, found.theirs / calls, found.ours / calls, found.ratio)


def tensors_on(
    device: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Return normal random tensors, the same at every call."""
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(s, generator=generator, device=device).mul_(1e-3).to(dtype) for s in shapes]
