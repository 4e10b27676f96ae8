"""Features that take part in the backward pass, under compiled autograd with an eager forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from amp_core import GradScaler, OpPolicy, Recipe, autocast, delayed_scales, guard, watch

X = torch.randn(4, 6)
CPU = OpPolicy.default("cpu")
Scope = Callable[[nn.Module], AbstractContextManager[Any]]


def plain(_model: nn.Module) -> AbstractContextManager[Any]:
    return nullcontext()


def compiled() -> AbstractContextManager[Any]:
    return torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))


def train(
    rule: str | Recipe, scope: Scope, overlap: bool, backward: Callable[[], AbstractContextManager[Any]]
) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", overlap=overlap)
    with scope(model), backward():
        for _ in range(3):
            with autocast("cpu", policy=CPU.override({"linear": rule})):
                loss = model(X).float().square().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
            optimizer.zero_grad()
    return [*model.parameters()]


@pytest.mark.parametrize(
    ("rule", "scope", "overlap"),
    [
        ("lower_precision_fp", plain, False),
        ("low_in_fp32_out", plain, False),
        (Recipe.mxfp8(), plain, False),
        (Recipe.fp8_delayed(history=4), delayed_scales, False),
        ("lower_precision_fp", plain, True),
        ("lower_precision_fp", guard, False),
        ("lower_precision_fp", watch, False),
    ],
    ids=["plain", "low_in_fp32_out", "recipe", "delayed scales", "overlap", "guard", "watch"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # by torch, of what it runs outside of its graphs
def test_few_graphs_with_the_same_result(rule: str | Recipe, scope: Scope, overlap: bool) -> None:
    """Dynamo takes hooks and products apart into dozens of graphs, which takes seconds for each layer."""
    torch._dynamo.reset()
    wanted = train(rule, scope, overlap, nullcontext)
    counters.clear()
    got = train(rule, scope, overlap, compiled)
    assert all(map(torch.equal, wanted, got))
    assert 0 < counters["frames"]["total"] <= 20
