"""guard: what it must leave as it is, and whose skipped steps it counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import amp_core
from amp_core import GradScaler, guard


class Masked(nn.Module):
    """Has a mask of -inf in its result, running statistics and random numbers."""

    def __init__(self, fault: bool = False) -> None:
        super().__init__()
        self.norm, self.linear, self.fault = nn.BatchNorm1d(4), nn.Linear(4, 4), fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(nn.functional.dropout(self.norm(x), 0.5))
        if self.fault:
            return 1 / nn.functional.dropout(torch.ones(4), 0.1)
        return x.masked_fill(torch.eye(4, dtype=torch.bool), -torch.inf)


def trained(watched: Callable[[nn.Module], Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with watched(model):
        for _ in range(3):
            loss = model(torch.randn(4, 4)).softmax(-1).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model.state_dict()


def test_a_second_look_changes_nothing() -> None:
    """The replay of a masked result advances running statistics and generators: the training is another."""
    plain, guarded = trained(lambda _: nullcontext()), trained(guard)
    assert plain[0] == guarded[0]
    assert all(map(torch.equal, plain[1].values(), guarded[1].values()))


def test_a_second_look_draws_the_same_numbers() -> None:
    """A replay with another dropout finds no op."""
    torch.manual_seed(3)
    model = Masked(fault=True)
    faults = []
    with guard(model):
        for _ in range(10):
            try:
                model(torch.randn(4, 4))
            except amp_core.NonFiniteError as error:
                faults.append(error.fault)
    assert faults
    assert None not in faults


def test_a_guard_that_the_forward_pass_attaches() -> None:
    """It sees the end of a step whose start it has not seen."""

    class Attaching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.guard = getattr(self, "guard", None) or guard(self)
            return super().forward(x)

    model = Attaching(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0], [1.0, -1.0]]))  # inf - inf is a NaN of addmm's own
    model.register_forward_hook(
        lambda *_: None
    )  # torch looks for hooks after the pass if there is one before
    with pytest.raises(amp_core.NonFiniteError, match="addmm"):
        model(torch.full((1, 2), torch.inf))
    model.guard.remove()


@pytest.mark.parametrize("landing", ["another model", "the same model"])
def test_skips_are_counted_for_each_optimizer(landing: str) -> None:
    """Another optimizer's steps hide that one skips every step."""
    torch.manual_seed(0)
    model, other = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.Linear(2, 2)
    beside = model[1] if landing == "the same model" else other
    bad, good = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model[0], beside))
    model.forward = lambda x: ((model[0](x) * 0).sum().sqrt(), beside(x).square().mean())
    scaler = GradScaler("cpu", init_scale=4.0, warn_after=0)

    def step() -> None:
        bad.zero_grad()
        good.zero_grad()
        scaler.scale(sum(model(torch.ones(1, 2)))).backward()
        scaler.step(bad)
        scaler.step(good)
        scaler.update()

    with guard(model, patience=3):
        for _ in range(3):
            step()
        with pytest.raises(amp_core.NonFiniteError):
            step()


def test_skips_of_other_models_are_not_counted() -> None:
    """The guard of a healthy model stops at an op because another one skips."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0, warn_after=0)
    with guard(model, patience=2) as watch:
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale((other(torch.ones(1, 2)) * 0).sum().sqrt()).backward()
            scaler.step(optimizer)
            scaler.update()
            model(torch.ones(1, 2))
            assert watch._finder is None


@pytest.mark.parametrize("steps", [None, range(2)])
def test_a_result_in_float8(steps: Any) -> None:
    """A quantised result is asked for what float8 cannot do."""

    class Quantised(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).to(torch.float8_e4m3fn)

    torch.manual_seed(1)  # of weights with which the result has NaN: inf is cast to 448
    model = Quantised(2, 2)
    with guard(model, steps=steps):
        model(torch.ones(1, 2))
        with pytest.raises(amp_core.NonFiniteError):
            model(torch.full((1, 2), torch.inf))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"steps": 3}, "steps= must be"), ({"steps": 0}, "steps= must be"), ({"patience": "a"}, "patience=")],
)
def test_wrong_arguments(arguments: Any, text: str) -> None:
    """They are found at the first step, or never."""
    with pytest.raises(TypeError, match=text):
        guard(nn.Linear(2, 2), **arguments)


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_replay_waits_for_no_other_rank(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's replay calls a collective that ranks with finite results do not: both hang."""
    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    nn.init.constant_(model.module[1].weight, 3e38)
    with guard(model):
        calls = []
        monkeypatch.setattr(model, "forward", lambda *a, f=model.forward: calls.append(1) or f(*a))
        with pytest.raises(amp_core.NonFiniteError) as caught:
            model(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))
    assert len(calls) == 1
    assert caught.value.fault.place.module == "module.1"


def test_sharded_models_are_looked_at_by_all_ranks_together(alone: Any) -> None:
    """One rank gathers weights for its replay while another reduces gradients."""
    model = fully_shard(nn.Linear(2, 2), mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    with guard(model), pytest.raises(amp_core.NonFiniteError, match=r"steps=\[0\]"):
        model(torch.full((1, 2), torch.inf))


class Spectrum(nn.Module):
    """Multiplies complex numbers."""

    def __init__(self, factor: float, *, real: bool) -> None:
        super().__init__()
        self.linear, self.factor, self.real = nn.Linear(4, 4), factor, real

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.fft.fft(self.linear(x)) * 1e20 * self.factor
        return z.abs() * 1e-20 if self.real else z


@pytest.mark.parametrize("real", [False, True], ids=["complex", "real"])
@pytest.mark.parametrize("steps", [None, [0]])
def test_complex_numbers(real: bool, steps: Any) -> None:
    """Goes on with inf in a complex result, or names the op that takes its magnitude."""
    model = Spectrum(1e30, real=real)
    with guard(model, steps=steps), pytest.raises(amp_core.NonFiniteError) as caught:
        model(torch.ones(2, 4))
    fault = caught.value.fault
    assert fault is not None
    assert (fault.kernel, fault.result.dtype) == ("aten::mul.Tensor", torch.complex64)
    assert 0.0 < fault.inputs[0].largest < 1e25
    assert fault.result.not_finite > 0.0


def test_complex_gradients() -> None:
    """Blames inf in a complex gradient on the first op with a real result."""
    model = Spectrum(1e2, real=True)
    with guard(model, steps=[0]), pytest.raises(amp_core.NonFiniteError) as caught:
        model(torch.ones(2, 4)).sum().backward(torch.tensor(1e37))
    fault = caught.value.fault
    assert fault is not None
    assert (fault.phase, fault.result.dtype) == ("backward", torch.complex64)


def test_optimizers_that_step_in_the_backward_pass() -> None:
    """The checks of a chosen step end within the backward pass, after which torch turns them on for good."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.125)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with amp_core.guard(model, steps=[0]):
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_guard_that_a_hook_of_the_backward_pass_removes() -> None:
    """The modes of its checks stay on for good, and Dynamo compiles nothing that runs under them."""
    model = nn.Linear(4, 4)
    attached = amp_core.guard(model, steps=[0])
    model.weight.register_hook(lambda _: attached.remove())
    model(torch.ones(1, 4)).sum().backward()
    with amp_core.record():
        pass
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
