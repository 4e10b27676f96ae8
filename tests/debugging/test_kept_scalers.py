"""Gradient scalers within the steps of `compare` and `advise`: left as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler as TorchScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import amp_core
from amp_core import AccumulationWindow, GradScaler, autocast


class Counting(GradScaler):
    """A scaler with a method and a count of its own, and a hook that fails."""

    def __init__(self, **options: Any) -> None:
        super().__init__("cpu", **options)
        self.count = torch.zeros(())
        self.register_step_hook(_fail)
        self.register_scale_change_hook(_fail)

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        self.count += 1


def _fail(_scaler: object, _event: object) -> None:
    raise AssertionError("a callback was told of a step that was not taken")


def _ours(**options: Any) -> GradScaler:
    return GradScaler("cpu", overlap=True, **options)


def _torchs(**options: Any) -> TorchScaler:
    return TorchScaler("cpu", **options)


def _sharded(**options: Any) -> ShardedGradScaler:
    group = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("fake", store=group.FakeStore(), rank=0, world_size=1)
    return ShardedGradScaler("cpu", **options)


def _state(scaler: TorchScaler) -> tuple[Any, ...]:
    seen = scaler._scale, scaler._growth_tracker
    kept = [] if not isinstance(scaler, GradScaler) else [*scaler.history, scaler._log.updates]
    return (scaler.state_dict(), *map(id, seen), dict(scaler._per_optimizer_states), kept)


def _advise(step: Callable[[], Any]) -> object:
    return amp_core.advise(step, "cpu", dtype=torch.float16, rounds=1)


def _for_speed(step: Callable[[], Any]) -> object:
    return amp_core.advise(step, "cpu", goal="speed", rounds=0)


def _compare(step: Callable[[], Any]) -> object:
    return amp_core.compare(step, "cpu", dtype=torch.float16)


def _training(scaler: TorchScaler, fails: bool = False) -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> Tensor:
        loss: Tensor = model(x).float().square().mean() * (float("inf") if fails else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return model, step


@pytest.mark.parametrize("tool", [_compare, _advise, pytest.param(_for_speed, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [_ours, _torchs, Counting])
@pytest.mark.parametrize("fails", [False, True])
def test_a_scaler_is_left_as_it_was(
    kind: Callable[..., TorchScaler], tool: Callable[[Callable[[], Any]], object], fails: bool
) -> None:
    """A look at one step lowers the loss scale of the training, or raises it, and fills its history."""
    scaler = kind(init_scale=64.0, growth_interval=2)
    model, step = _training(scaler, fails)
    tool(step)  # before its first step, when it has no device yet
    assert scaler.get_scale() == 64.0
    assert scaler._scale is None
    if isinstance(scaler, Counting):
        scaler._log.hooks.step.clear()
        scaler._log.hooks.change.clear()
    step()
    if isinstance(scaler, Counting):
        scaler.register_step_hook(_fail)
        assert scaler.count == 1
    before, weight = _state(scaler), model.weight.detach().clone()
    tool(step)
    assert _state(scaler) == before
    assert torch.equal(model.weight, weight)


def test_a_sharded_scaler_is_left_as_it_was() -> None:
    """Torch's scaler for FSDP, whose methods call none of its base, moves its scale."""
    scaler = _sharded(init_scale=64.0, growth_interval=1)
    try:
        _, step = _training(scaler)
        step()
        before = _state(scaler)
        amp_core.compare(step, "cpu")
        assert _state(scaler) == before
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", [_ours, _torchs])
def test_a_scaler_in_the_middle_of_a_step_goes_on_with_it(kind: Callable[..., TorchScaler]) -> None:
    """A comparison of a bad step unscales nothing, or the step of the training is refused afterwards."""
    scaler = kind(init_scale=64.0)
    model, step = nn.Linear(2, 2, bias=False), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start = model.weight.detach().clone()

    def whole() -> None:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        step.append("taken")

    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    amp_core.compare(whole, "cpu", model=model)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, start - 1.0)
    assert len(step) == 2


def test_a_window_within_the_step_leaves_nothing_behind() -> None:
    """The scaler refuses the next step of the training: it seems to be inside of a window."""
    scaler, model = GradScaler("cpu", init_scale=8.0), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        with AccumulationWindow(scaler, optimizer) as window:
            for _ in range(2):
                with window.micro_batch():
                    with autocast("cpu"):
                        loss = model(torch.ones(1, 2)).sum()
                    scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step()
    amp_core.compare(step, "cpu", model=model)
    step()
    assert len(scaler.history) == 2
    assert [record.number for record in scaler.history] == [0, 1]


def test_a_step_that_raises_leaves_the_scaler_as_it_was() -> None:
    """After an error in a compared step, the training goes on with another scale."""
    scaler, update = GradScaler("cpu", init_scale=8.0, growth_interval=1), GradScaler.update

    def step() -> None:
        scaler.scale(torch.ones((), requires_grad=True) * 1).backward()  # type: ignore[no-untyped-call]
        scaler.step(torch.optim.SGD([torch.ones(1, requires_grad=True)]))

    with pytest.raises(AssertionError, match="No inf checks"):
        amp_core.compare(step, "cpu")
    assert scaler.get_scale() == 8.0
    assert not scaler._scales.own.optimizer_states
    assert GradScaler.update is update
