"""Random programs of nested scopes and regions, of which torch.compile compiles a part."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import amp_core
from amp_core import GradScaler, OpPolicy, autocast

from . import alike
from .drawn import programs

X = torch.linspace(-1, 1, 8).reshape(2, 4)
FLOAT32 = OpPolicy.default("cpu").override({"linear": "fp32"})
Enter = Callable[[nn.Module, SGD], Any]

REGIONS: dict[str, Enter] = {
    "region": lambda *_: autocast("cpu"),
    "float16": lambda *_: autocast("cpu", dtype=torch.float16),
    "policy": lambda *_: autocast("cpu", policy=FLOAT32),
    "torch's": lambda *_: torch.autocast("cpu"),
    "disable": lambda *_: amp_core.disable(),
}
SCOPES: dict[str, Enter] = {
    "cached_casts": lambda model, _: amp_core.cached_casts(model),
    "master_weights": lambda model, _: amp_core.master_weights(model),
    "guard": lambda model, _: amp_core.guard(model),
    "watch": lambda model, _: amp_core.watch(model, every=1),
    "rules of an op": lambda model, _: amp_core.apply_policy(model, {"0": {"linear": "fp32"}}),
    "a float32 module": lambda model, _: amp_core.apply_policy(model, {"2": "fp32"}),
    "count_lost_updates": amp_core.count_lost_updates,
}
ALL = REGIONS | SCOPES


class Stop(Exception):
    """Ends a program early."""


@dataclass
class Program:
    """What to enter, and where the function breaks its graph or raises."""

    around: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    compiled: str = ""
    at: str = ""
    scaled: bool = False
    calls: int = 1

    @classmethod
    def draw(cls, choose: random.Random) -> Program:
        names = choose.sample(list(ALL), choose.randrange(1, 5))
        split = choose.randrange(len(names) + 1)
        return cls(
            [name for name in names[:split] if name in SCOPES],
            [*names[split:], *choose.choices(list(REGIONS), k=choose.randrange(2))],
            choose.choice(["model", "step"]),
            choose.choice(["", "", "break", "item", "raise"]),
            choose.random() < 0.4,
            choose.randrange(1, 4),
        )

    def run(self, compile: Callable[[Any], Any]) -> list[Any]:  # noqa: A002
        """Return the results of the calls, and the weights."""
        torch.manual_seed(0)
        torch.compiler.reset()
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer, scaler = SGD(model.parameters(), lr=0.125), GradScaler("cpu", init_scale=4.0)
        called = compile(model) if self.compiled == "model" else model

        def step(x: Tensor) -> Tensor:
            result = self.forward(called, lambda name: ALL[name](model, optimizer), x)
            loss = result.float().square().sum()
            if self.scaled:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            return result.detach()

        run, results = compile(step) if self.compiled == "step" else step, []
        with ExitStack() as scopes:
            for name in self.around:
                scopes.enter_context(ALL[name](model, optimizer))
            for _ in range(self.calls):
                try:
                    results.append(run(X))
                except Stop:
                    results.append("stopped")
        return [*results, *(parameter.detach() for parameter in model.parameters())]

    def forward(self, model: nn.Module, enter: Callable[[str], Any], x: Tensor, depth: int = 0) -> Tensor:
        """Call the model inside what is left to enter."""
        if depth < len(self.inside):
            with enter(self.inside[depth]):
                return self.forward(model, enter, x, depth + 1)
        result: Tensor = model(x)
        if self.at == "break":
            torch._dynamo.graph_break()
        elif self.at == "item":
            result = result * float(result.detach().abs().max() > -1)
        elif self.at == "raise":
            raise Stop
        return result


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by torch, when it compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # by Dynamo, of results between graphs
def test_random_programs() -> None:
    """A compiled program computes otherwise, warns, or leaves a region open."""
    for choose in programs(12.0):
        program = Program.draw(choose)
        expected = program.run(lambda function: function)
        found = program.run(torch.compile(backend="aot_eager"))
        assert len(found) == len(expected)
        for one, other in zip(expected, found, strict=True):
            assert alike.same(one, other, 1e-6, 1e-6), (program, expected, found)
        assert not torch.is_autocast_enabled("cpu"), program
