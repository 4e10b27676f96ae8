"""Steps that clear their gradients at the end: `compare` and `advise` have seen them before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_core
from amp_core.debugging.capture import PARAMETER


class Squares(nn.Module):
    """Its square exceeds the range of float16."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 400).square() / 160000


def _model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Squares(), nn.Linear(8, 2)), torch.randn(3, 4)


def _by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _by_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    model.zero_grad(set_to_none=False)


def _by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None


def _without_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def _by_none(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.parametrize("end", [_by_optimizer, _by_model, _by_hand, _without_a_step, _by_none])
@pytest.mark.parametrize("returns", [False, True])
def test_a_fault_is_found_in_a_step_that_clears_its_gradients(
    end: Callable[[nn.Module, torch.optim.Optimizer], None], returns: bool
) -> None:
    """The step is said to be within the tolerance: there is nothing left to compare."""
    model, x = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> Tensor | None:
        loss: Tensor = model(x).float().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        end(model, optimizer)
        return loss if returns else None

    comparison = amp_core.compare(step, "cpu", dtype=torch.float16)
    text = str(comparison)
    assert [lead.key.place.module for lead in comparison.leads()] == ["1"]
    assert "does not reach the result" not in text
    assert "within the tolerance" not in text
    if end is _by_none:
        assert "fn left none of a parameter" in text
    else:
        assert "largest relative error of a parameter's inf" in text
    assert amp_core.advise(step, "cpu", dtype=torch.float16).modules.keys() == {"1"}


@pytest.mark.parametrize("kind", [amp_core.GradScaler, torch.amp.GradScaler])
def test_gradients_are_compared_as_the_optimizer_gets_them(kind: Callable[..., Any]) -> None:
    """They are compared scaled, before clipping, or as a later backward pass left them."""
    torch.manual_seed(0)
    one, other, x = nn.Linear(4, 4), nn.Linear(4, 1), torch.randn(3, 4)
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, other))
    scaler, seen = kind("cpu", init_scale=128.0), dict[str, Tensor]()

    def note(model: nn.Module, name: str) -> None:
        seen.update(
            {f"{name}.{n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )

    first.register_step_pre_hook(lambda *_: note(one, "0"))
    second.register_step_pre_hook(lambda *_: note(other, "1"))

    def step() -> None:
        for optimizer in (first, second):
            scaler.scale(other(one(x)).float().square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)
            scaler.step(optimizer)
        scaler.update()
        first.zero_grad()
        second.zero_grad()

    model = nn.Sequential(one, other)
    rows = {row.key.name: row for row in amp_core.compare(step, "cpu", model=model).at(PARAMETER)}
    step()
    assert rows.keys() == seen.keys()
    for name, gradient in seen.items():
        assert rows[name].largest == pytest.approx(float(gradient.abs().max()), rel=1e-2)
        assert rows[name].error < 0.1


def test_gradients_from_before_the_step_are_none_of_it() -> None:
    """A step that begins with zero_grad is compared by the gradients of the step before."""
    model, x = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(x).sum().backward()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        return loss

    plain = amp_core.compare(lambda: model(x).square().mean(), "cpu")
    rows = amp_core.compare(step, "cpu").at(PARAMETER)
    assert [(row.key, row.error) for row in rows] == [(row.key, row.error) for row in plain.at(PARAMETER)]
