"""What it costs to look: a training step recorded, and compared, against the step alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import nn

import amp_core
from benchmarks.ab import Ratio, compare
from benchmarks.casts import Block


def run() -> Iterator[Ratio]:
    """Time steps of four transformer blocks, small and larger."""
    for width in (64, 512):
        model = nn.Sequential(*[Block(width) for _ in range(4)])
        x = torch.randn(8, 64, width)

        def forward(model: nn.Module = model, x: torch.Tensor = x) -> torch.Tensor:
            return model(x).float().square().mean()

        def step(forward: Callable[[], torch.Tensor] = forward) -> None:
            with amp_core.autocast("cpu"):
                loss = forward()
            loss.backward()

        with amp_core.record() as r:
            step()
        events = sum(r.ops.values()) + sum(count.calls for count in r.casts.values())
        named = f"four blocks, width {width}: {events} ops and casts"
        yield compare(f"{named}, recorded", step, lambda step=step: _recorded(step), rounds=15)
        yield compare(
            f"{named}, compared", step, lambda forward=forward: amp_core.compare(forward, "cpu"), rounds=7
        )
        guarded = copy.deepcopy(model)
        with amp_core.guard(guarded):
            yield compare(
                f"{named}, trained and guarded", _training(model, x), _training(guarded, x), rounds=101
            )


def _training(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with amp_core.autocast("cpu"):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _recorded(step: Callable[[], None]) -> None:
    with amp_core.record():
        step()
