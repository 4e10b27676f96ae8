"""Optimizers that step within `compare` and `advise`: outside of the region of the tool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_core
from amp_core import autocast
from amp_core.debugging.capture import OP


class Whitened(torch.optim.Optimizer):
    """Multiplies gradients by a matrix of float32 sums, as SOAP and Shampoo do; may call a closure."""

    def __init__(self, params: Any, seen: list[bool]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.seen = seen

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self._look()
        if closure is not None:
            with torch.enable_grad():
                closure()
            self._look()
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("sum", torch.zeros(len(param), len(param), dtype=param.dtype))
                state["sum"].lerp_(param.grad @ param.grad.mT, 0.1)
                param.sub_(state["sum"] @ param.grad, alpha=0.1)

    def _look(self) -> None:
        self.seen.append(torch.is_autocast_enabled("cpu"))


class Wrapper(Whitened):
    """Lets another optimizer step."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self._look()
        super().step(closure)
        Whitened(self.param_groups[0]["params"], self.seen).step()
        self._look()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Whitened, Wrapper])
def test_an_optimizer_steps_as_it_does_in_the_program(kind: type[Whitened], dtype: torch.dtype) -> None:
    """Its products run in bfloat16 as they never do in training: an error, or faults that there are not."""
    model, seen, after = nn.Linear(4, 4, bias=False, dtype=dtype), list[bool](), list[bool]()
    optimizer = kind(model.parameters(), seen)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 4, dtype=dtype)).float().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        after.append(torch.is_autocast_enabled("cpu"))
        return loss

    comparison = amp_core.compare(step, "cpu")
    assert seen
    assert not any(seen)
    assert all(after)
    names = {difference.key.name for difference in comparison.at(OP) if difference.dtype is dtype}
    assert any("mm" in name for name in names)
    amp_core.advise(step, "cpu")
    amp_core.advise(step, "cpu", goal="speed")
    assert not any(seen)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_runs_in_the_region(keyword: bool) -> None:
    """The forward pass that an optimizer calls runs in float32, and both runs are alike."""
    model, inside, outside = nn.Linear(4, 4, bias=False), list[bool](), list[bool]()
    optimizer = Whitened(model.parameters(), outside)

    def closure() -> Tensor:
        inside.append(torch.is_autocast_enabled("cpu"))
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 4)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def step() -> None:
        optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        optimizer.step(closure)

    assert amp_core.compare(step, "cpu").at(OP)[0].error > 0
    assert all(inside)
    assert not any(outside)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("region", [autocast, torch.autocast])
def test_a_region_of_the_program_around_the_step_stays(region: Callable[[str], Any]) -> None:
    """A program that steps in its region by mistake seems to be right."""
    model, seen = nn.Linear(4, 4, bias=False), list[bool]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))

    def step() -> None:
        with region("cpu"):
            model(torch.ones(2, 4)).float().square().mean().backward()
            optimizer.step()

    amp_core.compare(step, "cpu")
    assert seen
    assert all(seen)


def test_a_step_that_raises_leaves_no_state_behind() -> None:
    """Autocast stays off, or on, after the error."""
    model = nn.Linear(4, 4)  # whose bias makes a matrix of no use
    optimizer = Whitened(model.parameters(), [])

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for _ in range(2):
        with autocast("cpu"):
            with pytest.raises(RuntimeError, match="matrices"):
                amp_core.compare(step, "cpu")
            assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cpu")
