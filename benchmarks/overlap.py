"""A whole training step with gradients read during the backward, against one that reads them after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

import amp_core
from benchmarks.ab import Ratio, compare


def run() -> Iterator[Ratio]:
    """Compare `overlap=False`, on the left, with `overlap=True`: few large layers and many small ones."""
    for width, layers, batch in ((2048, 8, 16), (1024, 8, 16), (256, 100, 64)):
        sides = [_step(width, layers, batch, overlap=overlap) for overlap in (False, True)]
        yield compare(f"{layers} layers of {width}x{width}, batch {batch}: overlap=True", *sides)


def _step(width: int, layers: int, batch: int, *, overlap: bool) -> Callable[[], None]:
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = amp_core.GradScaler("cpu", overlap=overlap)
    inputs = torch.randn(batch, width)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(inputs).square().mean()).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()

    step()
    return step
