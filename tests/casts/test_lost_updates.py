"""count_lost_updates: which updates plain low-precision weights lose."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from amp_core import GradScaler, advise, count_lost_updates, master_weights

LOW = torch.bfloat16


def model_of(grad: list[float], dtype: torch.dtype = LOW) -> nn.ParameterDict:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(len(grad), dtype=dtype))})
    model["w"].grad = torch.tensor(grad, dtype=dtype)
    return model


@pytest.mark.parametrize("dtype", [LOW, torch.float16])
def test_counts_exactly_what_rounding_takes_away(dtype: torch.dtype) -> None:
    """Updates of zero, and those below float32's own precision, are not lost to the weight's dtype."""
    model = model_of([0.0, 1e-9, 1e-4, 1e-4, 0.5, 0.5, 0.5, 0.5], dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    counted = count_lost_updates(model, optimizer)
    optimizer.step()
    assert counted.lost_updates() == {"w": 0.25}
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert counted.lost_updates() == {"w": 0.0}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True, amsgrad=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "Muon": lambda p: torch.optim.Muon(p, lr=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_count_changes_nothing(name: str) -> None:
    """A look at the training must not alter it: not the weights, nor a state or a step number."""
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(6, 5, bias=False, dtype=LOW), nn.Linear(5, 3, bias=False, dtype=LOW))
    other = copy.deepcopy(one)
    plain, watched = OPTIMIZERS[name](one.parameters()), OPTIMIZERS[name](other.parameters())
    with count_lost_updates(other, watched) as counted:
        for step in range(4):
            for m, o in ((one, plain), (other, watched)):
                generator = torch.Generator().manual_seed(step)
                for p in m.parameters():
                    p.grad = torch.randn(p.shape, generator=generator).to(LOW)
                o.step()
            assert counted.lost_updates().keys() == {"0.weight", "1.weight"}
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(plain.state_dict(), watched.state_dict(), rtol=0, atol=0)
    assert len(watched.state) == 2


def test_the_state_of_the_optimizer_has_a_part_in_the_count() -> None:
    """The step on copies begins anew each time, so the updates of momenta alone are not counted."""
    model = model_of([1e-4, 0.5, 0.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    with count_lost_updates(model, optimizer) as counted:
        for _ in range(2):
            optimizer.step()
            assert counted.lost_updates()["w"] == pytest.approx(1 / 3)
            model["w"].grad = torch.zeros_like(model["w"])


def test_only_low_precision_weights_with_gradients_are_counted() -> None:
    """Float32 weights lose nothing to their storage; a copy of each would cost memory for nothing."""
    model = nn.ModuleDict(
        {"low": nn.Linear(2, 2, dtype=LOW), "wide": nn.Linear(2, 2), "frozen": nn.Linear(2, 2, dtype=LOW)}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for name in ("low", "wide"):
        for p in model[name].parameters():
            p.grad = torch.ones_like(p)
    with count_lost_updates(model, optimizer) as counted:
        optimizer.step()
    assert counted.lost_updates().keys() == {"low.weight", "low.bias"}


def test_layers_that_join_later_are_counted() -> None:
    """The updates of a layer that was added to the model later look as if none was lost."""
    model = model_of([1e-4])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with count_lost_updates(model, optimizer) as counted:
        model["late"] = model_of([1e-4, 0.5])["w"]
        optimizer.add_param_group({"params": [model["late"]]})
        optimizer.step()
        assert counted.lost_updates() == {"w": 1.0, "late": 0.5}


@pytest.mark.parametrize("fused", [False, True])
def test_the_step_record_has_the_count_of_its_own_step(fused: bool) -> None:
    """A skipped step loses no update, and a record must not show the numbers of another step."""
    model = model_of([1e-4, 0.5])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0, fused=fused)
    scaler = GradScaler("cpu", init_scale=1.0)
    with count_lost_updates(model, optimizer):
        for value in (1.0, float("inf"), 1.0):
            scaler.scale(torch.zeros(1, requires_grad=True))
            model["w"].grad = torch.full((2,), value, dtype=LOW)
            scaler.step(optimizer)
            scaler.update()
    taken, skipped, last = scaler.history
    assert taken.lost_updates == last.lost_updates == {"w": 1.0}
    assert skipped.skipped
    assert skipped.lost_updates is None
    scaler.scale(torch.zeros(1, requires_grad=True))
    scaler.step(optimizer)
    assert scaler.history[-1].lost_updates is None


def test_bad_calls_say_what_to_do() -> None:
    """A count that is silently missing reads as a training that loses nothing."""
    model = model_of([1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(TypeError, match="not NoneType"):
        count_lost_updates(model, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LBFGS"):
        count_lost_updates(model, torch.optim.LBFGS(model.parameters()))
    with count_lost_updates(model, optimizer) as counted:
        with pytest.raises(RuntimeError, match="without a closure"):
            optimizer.step(lambda: 0.0)
        with pytest.raises(RuntimeError, match="counted already"):
            master_weights(model, optimizer, "kahan", lost_updates=True)
    counted.remove()
    assert optimizer.step(lambda: 0.0) == 0.0


def test_advise_names_the_weights_that_need_more() -> None:
    """The user of a plain bfloat16 model learns which weights stand still, and what to do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1, dtype=LOW))
    x, before = torch.randn(16, 8), copy.deepcopy(model.state_dict())

    def step() -> torch.Tensor:
        return model(x).float().square().mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    advice = advise(step, "cpu", optimizer=optimizer)
    (weight,) = [f for f in advice.findings if f.fault.startswith("1.weight")]
    assert weight.before > 0.5
    assert weight.after == 0
    assert "master_weights" in weight.fix
    assert weight.fault in str(advice)
    assert not [f for f in advice.findings if f.fault.startswith("0.")]
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not advise(step, "cpu", optimizer=torch.optim.AdamW(model.parameters(), lr=0.5)).findings
    with pytest.raises(ValueError, match="no matter of speed"):
        advise(step, "cpu", optimizer=optimizer, goal="speed")


def test_advise_counts_the_updates_of_unscaled_gradients() -> None:
    """The loss scale that advise chooses makes every update large, so that no weight seems to stand still."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1, dtype=LOW)), torch.randn(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> torch.Tensor:
        return model(x).float().square().mean()

    advice = advise(step, "cpu", dtype=torch.float16, optimizer=optimizer)
    assert advice.init_scale is not None
    assert advice.init_scale > 1000
    assert [f.fault for f in advice.findings if f.fault.startswith("1.weight loses")]


def test_stochastic_storage_loses_some_and_remainder_none() -> None:
    """The count must find what bfloat16 alone would lose, and nothing where the storage keeps it."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(1000, dtype=LOW))})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    masters = master_weights(model, optimizer, "remainder", lost_updates=True)
    grad = torch.zeros(1000, dtype=LOW)
    grad[:500] = 0.001
    grad[:250] = 1e-9  # below float32's own precision at 1.0: the optimizer itself loses these
    model["w"].grad = grad
    optimizer.step()
    assert masters.lost_updates() == {"w": 0.0}
    masters.remove()
    masters = master_weights(model, optimizer, "stochastic", lost_updates=True)
    model["w"].grad = grad
    optimizer.step()
    # 0.001 is 0.256 of the gap below 1.0: so many are rounded down, and 250 of 1000 had an update.
    assert abs(masters.lost_updates()["w"] - 0.25 * 0.744) < 0.03


def test_what_a_compensation_loses_is_counted() -> None:
    """The weight before a step is taken without its compensation, so that nothing that is lost shows."""
    model = model_of([2.0**-10, 2.0**-10, 0.0], torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    grad = model["w"].grad
    masters = master_weights(model, optimizer, "kahan", lost_updates=True)
    model["w"].grad = grad.to(LOW)
    optimizer.step()
    assert masters.lost_updates() == {"w": 0.0}
    model["w"].grad = torch.tensor(
        [2.0**-21, 2.0**-10, 0.0], dtype=LOW
    )  # the first is below bfloat16's 2**-10
    optimizer.step()
    assert abs(masters.lost_updates()["w"] - 1 / 3) < 1e-6


class Lookahead(Optimizer):
    """Lets another optimizer step; its groups are those of the other one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.defaults = optimizer, optimizer.defaults

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Delegating(Optimizer):
    """Lets another optimizer step, and has groups of its own; the other one refers to it."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.inner = optimizer
        optimizer.outer = self  # type: ignore[attr-defined]

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("wrap", [Lookahead, Delegating, lambda inner: Lookahead(Delegating(inner))])
def test_advice_on_an_optimizer_that_lets_another_one_step(wrap: Any) -> None:
    """No weight seems to lose updates, as copies are not stepped, or an error names no wrapper."""
    model = nn.Linear(4, 4).bfloat16()
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-6))
    advice = advise(
        lambda: model(torch.ones(2, 4).bfloat16()).float().square().mean(), "cpu", optimizer=optimizer
    )
    assert {finding.fault.split()[0] for finding in advice.findings} == {"weight", "bias"}
