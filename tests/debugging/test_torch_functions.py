"""Subclasses of tensors and modes that get each function that a program calls, and may refuse it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import amp_core
from amp_core import autocast

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Strict(Tensor):
    """Notes the functions that are called with it, and refuses those that the programs here do not call."""

    called: ClassVar[list[str]] = []
    allowed: ClassVar = {"linear", "tanh", "sum", "float", "mul", "backward", "detach", "requires_grad_"}
    attributes: ClassVar = {"__get__", "__set__"}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.called.append(func.__name__)
        if func.__name__ not in cls.allowed | cls.attributes:
            raise TypeError(f"a Strict tensor has no {func.__name__}")
        return super().__torch_function__(func, types, args, kwargs or {})


class Log(TorchFunctionMode):
    """Notes the name of each function."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


TOOLS: dict[str, Callable[[nn.Module], Any]] = {
    "guard": amp_core.guard,
    "guard every op": lambda model: amp_core.guard(model, steps=lambda _: True),
    "watch": lambda model: amp_core.watch(model, every=1),
    "record": amp_core.record,
}


@contextlib.contextmanager
def nothing(_model: nn.Module) -> Iterator[None]:
    yield


def make(where: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), X
    if where == "weight":
        model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Strict))
    elif where == "input":
        x = x.as_subclass(Strict)
    return model, x


def trained(tool: Callable[[nn.Module], Any], where: str) -> tuple[list[Tensor], list[str]]:
    model, x = make(where)
    log = Log() if where == "mode" else Strict
    log.called.clear()
    with tool(model):
        for _ in range(2):
            with log if isinstance(log, Log) else contextlib.nullcontext(), autocast("cpu"):
                loss = model(x).float().sum()
            loss.backward()
    called = [name for name in log.called if name not in Strict.attributes]
    return [weight.grad.as_subclass(Tensor) for weight in model.parameters()], called


@pytest.mark.parametrize("where", ["input", "weight", "mode"])
@pytest.mark.parametrize("tool", TOOLS)
def test_only_what_the_program_calls_is_told(tool: str, where: str) -> None:
    """A tool calls other functions of a tensor, which refuses them in the middle of a training step."""
    (got, called), (expected, wanted) = trained(TOOLS[tool], where), trained(nothing, where)
    assert all(map(torch.equal, got, expected))
    assert called == wanted


@pytest.mark.parametrize("where", ["input", "weight"])
@pytest.mark.parametrize("goal", [None, "accuracy", "speed"])
def test_tensors_that_refuse_functions_are_compared(goal: Any, where: str) -> None:
    """A comparison ends in an error of the tensor's own library, or leaves the weights changed."""
    model, x = make(where)
    before = [weight.detach().as_subclass(Tensor).clone() for weight in model.parameters()]

    def step() -> Tensor:
        return model(x).sum()

    if goal is None:
        assert amp_core.compare(step, "cpu").at("op", "forward")
    else:
        amp_core.advise(step, "cpu", goal=goal)
    now = [weight.detach().as_subclass(Tensor) for weight in model.parameters()]
    assert all(map(torch.equal, now, before))


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor", "ignore:.*is deprecated")
def test_quantised_parameters_are_left_out() -> None:
    """Torch refuses to measure a quantised tensor, in the middle of a training step."""
    model = nn.Linear(4, 4)
    model.scales = nn.Parameter(torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), requires_grad=False)
    with amp_core.guard(model, steps=[0]), amp_core.watch(model, every=1) as ranges:
        model(X).sum().backward()
    assert {entry.name for entry in ranges.entries if entry.kind == "weight"} == {"weight", "bias"}
