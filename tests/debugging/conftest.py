"""What the tests of compare and advise share: models with one planted fault each."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Attention(nn.Module):
    """Its scores are right in the end, but pass through numbers of about gain^2."""

    def __init__(self, dim, gain):
        super().__init__()
        self.qkv, self.out, self.gain = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), gain

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = torch.matmul(q * self.gain, (k * self.gain).transpose(-1, -2)) / self.gain**2
        return self.out(torch.matmul(torch.softmax(scores, -1), v))


class Block(nn.Module):
    def __init__(self, dim, gain):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), Attention(dim, gain)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, gains):
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, gain) for gain in gains)
        self.norm = nn.BatchNorm1d(8)  # buffers that a step changes
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Shrink(nn.Module):
    def forward(self, x):
        return x * 2e-4


class Variance(nn.Module):
    """The textbook formula, whose two terms cancel."""

    def forward(self, x):
        return (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2


@pytest.fixture
def attention():
    torch.manual_seed(0)
    return Transformer([1.0, 1.0, 400.0, 1.0])


@pytest.fixture
def shrinking():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), Shrink(), nn.Linear(16, 4))


@pytest.fixture
def variance():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 512), Variance(), nn.Linear(1, 4))
    nn.init.constant_(model[0].bias, 10.0)
    return model


@pytest.fixture
def step():
    """``step(model, weight)``: a function that runs the forward pass on one batch and returns its loss."""
    torch.manual_seed(1)
    x, y = torch.randn(2, 8, 16), torch.randn(2, 8, 4)
    return lambda model, weight=1.0: lambda: nn.functional.mse_loss(model(x), y) * weight
