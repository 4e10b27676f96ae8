"""Random models and steps that compare and advise run, and leave as they were."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import autocast

from ..alike import same
from ..drawn import programs

LOW = torch.bfloat16


class Around(nn.Module):
    """Calls a module in another way."""

    def __init__(self, module: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.module, x)


class Mean(nn.Module):
    """Keeps a running mean: in the same buffer, in a new one each time, or in one that its call adds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind != "added":
            self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().float().mean(0)
        if self.kind == "added" and not hasattr(self, "mean"):
            self.register_buffer("mean", now)
        elif self.kind == "replaced":
            self.mean = self.mean.lerp(now, 0.5)
        else:
            self.mean.lerp_(now, 0.5)
        return x + self.mean.clone()


def _in_float32(module: nn.Module, x: Tensor) -> Tensor:
    with autocast("cpu", enabled=False):
        return module(x.float())


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "batch norm": lambda: nn.BatchNorm1d(8),
    "dropout": lambda: nn.Dropout(0.3),
    "gelu": nn.GELU,
    "embedding": lambda: Around(nn.Embedding(4, 8), lambda table, x: x + table((x[:, 0] > 0).long())),
    "float32": lambda: Around(nn.Linear(8, 8), _in_float32),
    "residual": lambda: Around(nn.Linear(8, 8), lambda layer, x: x + layer(x)),
    "checkpoint": lambda: Around(nn.Linear(8, 8), lambda f, x: checkpoint(f, x, use_reentrant=False)),
    "attention": lambda: Around(nn.MultiheadAttention(8, 2), lambda f, x: f(x, x, x, need_weights=False)[0]),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "power": lambda: Around(nn.Linear(8, 8), lambda f, x: torch._foreach_pow(2, [f(x).sigmoid()])[0]),
    **{f"mean {kind}": lambda kind=kind: Mean(kind) for kind in ("in place", "replaced", "added")},
}


class Program:
    """A model, its optimizer, and a step."""

    def __init__(self, choose: random.Random) -> None:
        torch.manual_seed(choose.randrange(1000))
        self.parts = choose.choices(list(PARTS), k=choose.randrange(1, 4))
        self.model = nn.Sequential(nn.Linear(8, 8), *(PARTS[name]() for name in self.parts), nn.Linear(8, 3))
        self.model[-1].weight.requires_grad_(choose.random() < 0.7)
        self.x, self.y = torch.randn(6, 8, requires_grad=choose.random() < 0.3), torch.arange(6) % 3
        self.optimizer = choose.choice([lambda p: SGD(p, 0.1, 0.9), AdamW])(self.model.parameters())
        self.options = [
            name for name in ("backward", "step", "zero", "region", "eval") if choose.random() < 0.3
        ]
        if choose.random() < 0.5:  # in the middle of a training
            self.loss().backward()
            self.optimizer.step()

    def loss(self) -> Tensor:
        return F.cross_entropy(self.model(self.x).float(), self.y)

    def step(self) -> Tensor:
        if "zero" in self.options:
            self.optimizer.zero_grad()
        if "eval" in self.options:
            self.model.eval()
        with autocast("cpu", dtype=LOW) if "region" in self.options else nullcontext():
            loss = self.loss()
        if "backward" in self.options or "step" in self.options:
            loss.backward()
        if "step" in self.options:
            self.optimizer.step()
        return loss

    def state(self) -> list[Any]:
        tensors = dict([*self.model.named_parameters(), *self.model.named_buffers(), ("x", self.x)])
        held = [(name, id(each), id(each.grad) if each.is_leaf else 0) for name, each in tensors.items()]
        values = [each.detach().clone() for each in tensors.values()]
        momenta = [value for state in self.optimizer.state.values() for value in state.values()]
        generators = [torch.get_rng_state(), random.getstate()]
        return [
            held,
            [m.training for m in self.model.modules()],
            *generators,
            *values,
            *copy.deepcopy(momenta),
        ]


TOOLS: dict[str, Callable[[Program], Any]] = {
    "compare": lambda p: amp_core.compare(p.step, "cpu", dtype=LOW, model=p.model),
    "format": lambda p: amp_core.compare(p.step, "cpu", format="mxfp8", model=p.model),
    "advise": lambda p: amp_core.advise(p.step, "cpu", dtype=LOW, model=p.model, rounds=2),
    "speed": lambda p: amp_core.advise(p.step, "cpu", dtype=LOW, model=p.model, goal="speed", rounds=1),
}


@pytest.mark.filterwarnings("ignore::amp_core.EmulationWarning")
def test_compared_programs_are_left_as_they_were() -> None:
    """A comparison or a trial of advise() fails, or the training goes on from another state."""
    for choose in programs(seconds=12):
        program = Program(choose)
        # It refuses steps with regions of their own.
        tool = choose.choice([each for each in TOOLS if each != "speed" or "region" not in program.options])
        before = program.state()
        TOOLS[tool](program)
        after = program.state()
        assert len(after) == len(before), (program.parts, program.options, tool)
        for one, other in zip(before, after, strict=True):
            assert same(one, other, 0, 0), (program.parts, program.options, tool, one, other)


def _trained(program: Program, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the gradients of a training step, whose backward pass runs outside of the region."""
    program = copy.deepcopy(program)
    program.model.zero_grad()
    torch.manual_seed(0)
    if "eval" in program.options:
        program.model.eval()
    with nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
        loss = program.loss()
    loss.backward()
    return {name: p.grad for name, p in program.model.named_parameters() if p.grad is not None}


def test_compared_gradients_are_those_of_training() -> None:
    """A comparison blames, or clears, a step that computes in another precision than the training."""
    for choose in programs(seconds=8):
        program = Program(choose)
        program.options = [each for each in program.options if each not in ("zero", "step")]
        program.model.zero_grad()
        c = amp_core.compare(program.step, "cpu", dtype=LOW, model=program.model)
        exact, low = _trained(program, None), _trained(program, LOW)
        wanted = {name: float((low[name] - g).norm() / g.norm()) for name, g in exact.items() if g.norm()}
        found = {d.key.name: d.error for d in c.at("parameter") if d.key.name in wanted}
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6), (program.parts, program.options)
