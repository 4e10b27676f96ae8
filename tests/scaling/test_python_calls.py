"""Count the Python functions that a step calls, which take most of the time of a step of small tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import amp_core
from amp_core import GradScaler

from ..counted import calls_of

OURS = ("amp_core.", "amp_backend_")


def calls_of_a_step(tensors: int, fused: bool, max_norm: float | None) -> int:
    params = [torch.nn.Parameter(torch.ones(8)) for _ in range(tensors)]
    optimizer = torch.optim.SGD(params, lr=0.1, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    for param in params:
        param.grad = torch.ones(8)

    def step() -> None:
        scaler.step(optimizer, max_norm=max_norm)
        scaler.update()

    step()
    step()
    return calls_of(step, OURS)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("fused", [False, True])
def test_the_calls_of_a_step_do_not_grow_with_its_tensors(fused: bool, max_norm: float | None) -> None:
    """A step calls Python functions for each tensor, and is slower than torch's on a model of many layers."""
    if amp_core.get_backend("cpu").kernels().name != "compiled":
        pytest.skip("the portable kernels call torch for each tensor where it has no function for lists")
    for fewer, more in ((2, 10), (50, 200)):  # torch's kernel takes a few small gradients
        assert calls_of_a_step(fewer, fused, max_norm) == calls_of_a_step(more, fused, max_norm)


def test_skipped_steps_of_many_optimizers_take_linear_time() -> None:
    """After one skipped step, each update looks for each record among the last steps of all optimizers."""

    def calls(count: int) -> int:
        scaler = GradScaler("cpu", warn_after=0)
        scaler.scale(torch.ones(()))
        optimizers = []
        for number in range(count):
            param = torch.nn.Parameter(torch.ones(8))
            param.grad = torch.full((8,), torch.inf if number == 0 else 1.0)
            optimizers.append(torch.optim.SGD([param], lr=0.1))

        def step() -> None:
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()

        step()
        return calls_of(step, OURS)

    assert calls(160) < 4.5 * calls(40)


def test_a_window_of_many_optimizers_takes_linear_time() -> None:
    """At the end of a window, each of its optimizers looks through the parameters of all."""

    def tensors(count: int) -> int:
        scaler, model = GradScaler("cpu"), torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(count))
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
        window, unbound = amp_core.AccumulationWindow(scaler, optimizers), 0

        class Counting(TorchFunctionMode):
            def __torch_function__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                nonlocal unbound
                result = function(*args, **(kwargs or {}))
                unbound += len(result) if getattr(function, "__name__", "") == "unbind" else 0
                return result

        with Counting(), window, window.micro_batch():
            scaler.scale(sum(layer(torch.ones(1, 1)).sum() for layer in model)).backward()
        return unbound

    assert tensors(40) < 200
