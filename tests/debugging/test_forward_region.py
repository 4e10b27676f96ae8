"""Backward passes and optimizers within `compare` and `advise`: outside of the region of the tool."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_core
from amp_core import autocast
from amp_core.debugging.capture import OP, PARAMETER


class Island(nn.Module):
    """A layer whose forward and backward pass are in float32, whatever the region."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            result: Tensor = self.linear(x.float())
            return result


def _by_method(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _by_function(loss: Tensor) -> None:
    torch.autograd.backward([loss])


def _scaled(loss: Tensor) -> None:
    amp_core.GradScaler("cpu", init_scale=1.0).scale(loss).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("backward", [_by_method, _by_function, _scaled])
@pytest.mark.parametrize("region", [contextlib.nullcontext, autocast, torch.autocast])
def test_a_backward_pass_of_the_step_leaves_the_region(
    region: Callable[..., Any], backward: Callable[[Tensor], None]
) -> None:
    """A float32 layer is blamed for products in float16 that no training step computes."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), Island(), nn.Linear(8, 4)), torch.randn(4, 8)
    own = () if region is contextlib.nullcontext else ("cpu", torch.float16)

    def fn() -> Tensor:
        with region(*own):
            loss: Tensor = model(x).float().square().mean()
        backward(loss)
        return loss

    plain = amp_core.compare(lambda: model(x).float().square().mean(), "cpu", dtype=torch.float16)
    passes = torch.autograd.backward
    c = amp_core.compare(fn, "cpu", dtype=torch.float16)
    products = {row.key: row.dtype for row in c.at(OP, "backward") if row.key.name.startswith("aten::mm")}
    assert {dtype for key, dtype in products.items() if key.place.module == "1.linear"} == {torch.float32}
    assert {row.key: row.dtype for row in plain.at(OP, "backward")}.items() >= products.items()
    assert [(r.key, r.error) for r in c.at(PARAMETER)] == [(r.key, r.error) for r in plain.at(PARAMETER)]
    assert "loss scale        that of fn\n" in str(c)
    assert "loss scale        1\n" in str(plain)
    assert torch.autograd.backward is passes


@pytest.mark.parametrize("region", [autocast, torch.autocast])
def test_a_backward_pass_in_a_region_of_the_step_stays_there(region: Callable[..., Any]) -> None:
    """A step that runs its backward pass in a region is compared with another one."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), Island()), torch.randn(4, 8)

    def fn() -> None:
        with region("cpu", torch.float16):
            model(x).float().square().mean().backward()

    c = amp_core.compare(fn, "cpu", dtype=torch.float16, model=model)
    products = {r.key.place.module: r.dtype for r in c.at(OP, "backward") if "::mm" in r.key.name}
    assert products == {"0": torch.float16, "1.linear": torch.float16}


def test_a_forward_pass_that_differentiates_stays_in_the_region() -> None:
    """The forces of a model, gradients of its energy, are compared in another precision than in training."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)

    def fn() -> Tensor:
        (forces,) = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
        return forces.float().square().sum()

    c = amp_core.compare(fn, "cpu", dtype=torch.float16, model=model)
    assert torch.float16 in {r.dtype for r in c.at(OP) if "::mm" in r.key.name}


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


@pytest.mark.parametrize("around_the_tool", [False, True])
@pytest.mark.parametrize("region", [autocast, torch.autocast])
def test_a_region_of_the_program_around_the_step_stays(
    region: Callable[[str], Any], around_the_tool: bool
) -> None:
    """A program that steps in its region by mistake seems to be right."""
    model, seen = nn.Linear(4, 4, bias=False), list[bool]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))

    def step() -> None:
        with contextlib.nullcontext() if around_the_tool else region("cpu"):
            model(torch.ones(2, 4)).float().square().mean().backward()
            optimizer.step()

    with region("cpu") if around_the_tool else contextlib.nullcontext():
        amp_core.compare(step, "cpu")
    assert seen
    assert all(seen)


def test_a_step_that_raises_leaves_no_state_behind() -> None:
    """Autocast stays off, or on, after the error."""
    model = nn.Linear(4, 4)  # whose bias makes a matrix of no use
    optimizer = Whitened(model.parameters(), [])

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    for _ in range(2):
        with autocast("cpu"):
            with pytest.raises(RuntimeError, match="matrices"):
                amp_core.compare(step, "cpu")
            assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cpu")
