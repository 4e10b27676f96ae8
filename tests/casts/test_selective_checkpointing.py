"""Blocks under selective activation checkpointing, which numbers the casts of weights among their ops."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import amp_core
from amp_core import autocast, cached_casts, master_weights

X = torch.linspace(-1, 1, 36).reshape(6, 6)
SCOPES = pytest.mark.parametrize("scope", [cached_casts, master_weights])


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 6))


def save_all(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def checkpointed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, save_all)
    with autocast("cpu", dtype=torch.bfloat16):
        return checkpoint(model, x, use_reentrant=False, context_fn=contexts)


@SCOPES
@pytest.mark.parametrize("small", [0, 2**22])
@pytest.mark.parametrize("pending", [1, 3])
@pytest.mark.parametrize("ended", [True, False])
def test_selective_checkpointing_that_saves_casts(
    scope: Any, small: int, pending: int, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recomputation that makes no cast of a weight takes the weight's cast for the input."""
    monkeypatch.setattr("amp_core.casts.bulk.SMALL_ON_HOST", small)

    def gradients(model: nn.Module, end: Callable[[], object]) -> list[torch.Tensor]:
        inputs = [X.clone().requires_grad_() for _ in range(6)]
        losses = []
        for x in inputs:
            losses.append(checkpointed(model, x).float().square().sum())
            if len(losses) == pending:
                if x is inputs[-1]:
                    end()
                while losses:
                    losses.pop().backward()
        return [t.grad for t in (*inputs, *model.parameters())]

    model = make()
    expected = gradients(make(), lambda: None)
    with scope(model) as casts:
        got = gradients(model, casts.remove if ended else lambda: None)
    assert all(map(torch.equal, got, expected))


@SCOPES
def test_selective_checkpointing_within_a_policy(scope: Any) -> None:
    """A rule that runs in Python takes its cast of a weight from outside of the block, once it is kept."""
    policy = amp_core.OpPolicy.default("cpu").override({"softmax": "lower_precision_fp"})
    weight = nn.Parameter(X.clone())
    model = nn.Module()
    model.weight = weight
    contexts = functools.partial(create_selective_checkpoint_contexts, save_all)

    def gradients() -> list[torch.Tensor]:
        weight.grad = None
        for _ in range(3):
            x = X.clone().requires_grad_()
            with autocast("cpu", policy=policy):
                outside = torch.softmax(weight, -1)
                inside = checkpoint(
                    lambda x: torch.softmax(weight, -1) @ torch.softmax(x, -1),
                    x,
                    use_reentrant=False,
                    context_fn=contexts,
                )
            (outside.float() * inside.float()).sum().backward()
        return [weight.grad.clone(), x.grad]

    with scope(model):
        first, second = gradients(), gradients()
    assert all(map(torch.equal, first, second))


def test_selective_checkpointing_of_delayed_scales() -> None:
    """The record of a magnitude counts as an op of the block: "has been mutated", or zeros of a history."""
    policy = amp_core.OpPolicy.default("cpu").override({"linear": amp_core.Recipe.fp8_delayed(history=6)})
    region = functools.partial(autocast, "cpu", policy=policy)
    layer = nn.Linear(6, 6)

    @contextlib.contextmanager
    def again(compared: Any) -> Iterator[None]:
        with region(), compared:
            yield

    def contexts() -> tuple[Any, Any]:
        first, second = create_selective_checkpoint_contexts(save_all)
        return first, again(second)

    def block(x: torch.Tensor) -> torch.Tensor:
        return layer(x) * (torch.zeros(6) + 1)

    def gradients(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        layer.zero_grad()
        x = X.clone().requires_grad_()
        with amp_core.delayed_scales(layer):
            for _ in range(2):
                with region():
                    out = run(x)
                out.square().sum().backward()
        return [x.grad, *(p.grad.clone() for p in layer.parameters())]

    expected = gradients(block)
    got = gradients(lambda x: checkpoint(block, x, use_reentrant=False, context_fn=contexts))
    assert all(map(torch.equal, got, expected))


def test_selective_checkpointing_of_a_shared_weight() -> None:
    """The recomputation casts a shared weight another number of times than the forward pass did."""
    layer = nn.Linear(6, 6)

    def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op in {torch.ops.aten.addmm.default, torch.ops.aten.mm.default}
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def run() -> list[torch.Tensor]:
        layer.zero_grad()
        with autocast("cpu"):
            out = checkpoint(
                lambda x: layer(torch.relu(layer(x))),
                layer(X),  # the weight has been used before the checkpointed part
                use_reentrant=False,
                context_fn=functools.partial(create_selective_checkpoint_contexts, keep_products),
            )
        out.float().square().sum().backward()
        return [p.grad.clone() for p in layer.parameters()]

    with autocast("cpu"):
        layer(torch.relu(layer(layer(X)))).float().square().sum().backward()
    expected = [p.grad.clone() for p in layer.parameters()]
    for scope in (cached_casts, amp_core.master_weights):
        with scope(layer):
            torch.testing.assert_close(run(), expected, rtol=2**-7, atol=0)  # there are two casts of it
