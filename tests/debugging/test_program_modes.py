"""The dispatch modes of a program that begin and end while tools look at its ops, in any order."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import amp_core
from amp_core import NonFiniteError, autocast

from ..drawn import programs
from ..modes import Passing

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Log(TorchDispatchMode):
    """Notes the name of each op."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Ops of which a tool runs some, too, on what it measures."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).float() * 2
        return self.last((y != 0).float() * y.abs().sin()).float() * x.abs()


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


TOOLS: dict[str, Callable[[nn.Module], Any]] = {
    "guard": amp_core.guard,
    "guard every op": lambda model: amp_core.guard(model, steps=lambda _: True),
    "guard a layer": lambda model: amp_core.guard(model[1].first, steps=lambda step: step % 2 == 0),
    "watch": lambda model: amp_core.watch(model, every=2),
    "record": amp_core.record,
    "none": lambda _model: contextlib.nullcontext(),
}


class Program:
    """Steps of a model, and modes and tools that begin and end between their halves."""

    def __init__(self, tools: list[str]) -> None:
        self.model, self.loss = make(), X.sum()
        self.modes: list[Log] = []
        self.seen: list[list[str]] = []
        self.tools = [*tools]
        self.on = contextlib.ExitStack()

    def forward(self) -> None:
        with autocast("cpu", cache_enabled=False):
            self.loss = self.model(X).square().sum()

    def backward(self) -> None:
        if self.loss.requires_grad:
            self.loss.backward()
            self.loss = self.loss.detach()

    def enter(self) -> None:
        self.modes.append(Log().__enter__())

    def leave(self) -> None:
        if self.modes:
            self.seen.append(self.modes[-1].ops)
            self.modes.pop().__exit__(None, None, None)

    def begin(self) -> None:
        if self.tools:
            self.on.enter_context(TOOLS[self.tools.pop()](self.model))

    def end(self) -> None:
        self.on.pop_all().close()

    def run(self, parts: list[str]) -> tuple[list[list[str]], list[Tensor]]:
        try:
            for part in parts:
                getattr(self, part)()
                now = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Log)]
                assert now == self.modes, part
        finally:
            self.end()
            while self.modes:
                self.leave()
        assert not _get_current_dispatch_mode_stack()
        return self.seen, [weight.grad for weight in self.model.parameters() if weight.grad is not None]


PARTS = ["forward", "forward", "forward", "backward", "backward", "enter", "leave", "begin", "begin", "end"]


def drawn(draw: random.Random) -> tuple[list[str], list[str]]:
    return draw.choices(list(TOOLS), k=3), draw.choices(PARTS, k=12)


def test_modes_see_the_program_and_end_with_it() -> None:
    """A mode stays on for good, or sees what a tool measures, or a tool stops to look."""
    for draw in programs(seconds=6, number="program modes"):
        tools, parts = drawn(draw)
        seen, gradients = Program(tools).run(parts)
        alone, wanted = Program(["none"] * 3).run(parts)
        assert seen == alone, (tools, parts)
        assert all(map(torch.equal, gradients, wanted)), (tools, parts)


@pytest.mark.parametrize("mode", [Passing, functools.partial(FlopCounterMode, display=False)])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_guard_looks_on_after_a_mode_has_ended(mode: Callable[[], Any], where: str) -> None:
    """The end of a mode around the forward pass ends the checks of the guard in its place."""
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(3e38 if where == "forward" else 1.0)

    def step() -> None:
        with mode():
            result = model(X + 3)
        result.backward(torch.full_like(result, 3e38))

    with amp_core.guard(model, steps=[0]), pytest.raises(NonFiniteError, match=f"{where} pass of step 0"):
        step()


def save_all(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("tool", TOOLS)
def test_selective_checkpoints_number_no_measurement(tool: str) -> None:
    """What a tool measures in a checkpointed block is taken for the block's own ops when it is recomputed."""
    contexts = functools.partial(create_selective_checkpoint_contexts, save_all)

    def gradients(name: str) -> list[Tensor]:
        model, x = make(), X.clone().requires_grad_()
        with TOOLS[name](model):
            for _ in range(2):
                with autocast("cpu", cache_enabled=False):
                    y = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
                y.square().sum().backward()
        return [t.grad for t in (x, *model.parameters())]

    assert all(map(torch.equal, gradients(tool), gradients("none")))
