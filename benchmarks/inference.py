"""Inference: materialized models against the region, against float32's bytes, and against casts by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

import amp_core
from benchmarks.ab import Ratio, compare
from benchmarks.casts import Block, Gpt

LOW = torch.bfloat16


class Stage(nn.Module):
    """Two convolutions with batch norms and a skip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return x of shape (batch, channels, height, width)."""
        y = functional.relu(self.norms[0](self.convs[0](x)))
        return functional.relu(x + self.norms[1](self.convs[1](y)))


class LowLinear(nn.Linear):
    """A linear layer that casts what it is given to the dtype of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x of shape (..., out_features), in the weight's dtype."""
        return functional.linear(x.to(self.weight.dtype), self.weight, self.bias)


class LowConv2d(nn.Conv2d):
    """A convolution that casts what it is given to the dtype of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x of shape (batch, channels, height, width), in the weight's dtype."""
        return super().forward(x.to(self.weight.dtype))


def by_hand(model: nn.Module) -> nn.Module:
    """Return a copy with the casts of autocast written by hand, and the weights stored low."""
    low = copy.deepcopy(model)
    for layer in low.modules():
        if type(layer) in (nn.Linear, nn.Conv2d):
            layer.to(LOW)
            layer.__class__ = LowLinear if isinstance(layer, nn.Linear) else LowConv2d
    return low


def _models() -> dict[str, Callable[[], tuple[nn.Module, Tensor]]]:
    return {
        "MLP, 8 layers of 1024, batch 16": lambda: (
            nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8))),
            torch.randn(16, 1024),
        ),
        "4 blocks of GPT-2 small, 128 tokens": lambda: (
            nn.Sequential(*(Block(768) for _ in range(4))),
            torch.randn(1, 128, 768),
        ),
        "GPT of 4 layers, d=512, vocabulary 8192, 64 tokens": lambda: (
            Gpt(4, 512, 8192),
            torch.randint(8192, (1, 64)),
        ),
        "4 residual stages of 64 channels, batch 4x28x28": lambda: (
            nn.Sequential(*(Stage(64) for _ in range(4))),
            torch.randn(4, 64, 28, 28),
        ),
    }


def run() -> Iterator[Ratio]:
    """Compare time and bytes of each model."""
    for name, make in _models().items():
        torch.manual_seed(0)
        model, x = make()
        model.eval()
        with torch.no_grad():
            yield from _rows(name, model, x)


def _rows(name: str, model: nn.Module, x: Tensor) -> Iterator[Ratio]:
    low, hand = amp_core.materialize(model, (x,), dtype=LOW), by_hand(model)
    assert torch.equal(low(x), hand(x))

    def region() -> None:
        with torch.autocast("cpu", LOW):
            model(x)

    yield compare(f"{name}: by hand", lambda: hand(x), lambda: low(x), rounds=25)
    yield compare(f"{name}: torch.autocast", region, lambda: low(x))
    wide, less = (sum(t.nbytes for t in (*m.parameters(), *m.buffers())) for m in (model, low))
    yield Ratio(f"{name}: weights in float32", wide, less, less / wide, "B")
