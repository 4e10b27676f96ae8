"""Schedulers and averages of weights within the steps of `compare` and `advise`: left as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import amp_core
from amp_core.callbacks import SkipAwareAverage, SkipAwareScheduler

Made = Callable[[torch.optim.Optimizer], LRScheduler]


def _chained(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return schedulers.ChainedScheduler(
        [schedulers.StepLR(optimizer, 1), schedulers.ExponentialLR(optimizer, 0.9)]
    )


def _one_after_another(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [schedulers.LinearLR(optimizer), schedulers.CosineAnnealingLR(optimizer, 5)]
    return schedulers.SequentialLR(optimizer, parts, [2])


def _cyclic(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return schedulers.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3)


def _plateau(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return schedulers.ReduceLROnPlateau(optimizer, patience=0)


KINDS: list[Made] = [
    *(_chained, _one_after_another, _cyclic, _plateau),
    lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=50),
    lambda optimizer: SWALR(optimizer, 0.05),
]


def _rates(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [True, False])
def test_a_scheduler_is_left_as_it_was(kind: Made, steps: bool) -> None:
    """A look at one step takes the learning rate of the training several steps further."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = kind(optimizer)

    def step() -> Tensor:
        loss: Tensor = model(x).float().square().mean()
        if steps:
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
        return loss

    optimizer.step()
    step()
    before = scheduler.state_dict(), scheduler.get_last_lr(), _rates(optimizer)
    amp_core.compare(step, "cpu")
    amp_core.advise(step, "cpu", dtype=torch.float16)
    assert (scheduler.state_dict(), scheduler.get_last_lr(), _rates(optimizer)) == before
    step()
    assert (scheduler.state_dict(), _rates(optimizer)) != (before[0], before[2])


@pytest.mark.parametrize("aware", [False, True])
def test_an_average_is_left_as_it_was(aware: bool) -> None:
    """A look at one step counts towards the average of the weights."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(3, 4)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, scaler = schedulers.StepLR(optimizer, 1), amp_core.GradScaler("cpu", init_scale=8.0)
    if aware:
        SkipAwareAverage(average, scaler)
        SkipAwareScheduler(scheduler, scaler)

    def step() -> Tensor:
        loss: Tensor = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
        optimizer.zero_grad()
        return loss

    def state() -> list[Any]:
        return [{k: v.tolist() for k, v in average.state_dict().items()}, scheduler.state_dict()]

    step()
    before = state()
    amp_core.compare(step, "cpu")
    assert state() == before
    step()
    assert average.n_averaged == 2
    assert scheduler.last_epoch == 2
    update_bn([x], average)


def test_a_scheduler_that_the_step_makes_works_afterwards() -> None:
    """A step that makes its scheduler at its first call leaves half of one behind."""
    model, made = nn.Linear(4, 4), list[LRScheduler]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> Tensor:
        if not made:
            made.append(schedulers.StepLR(optimizer, 1, 0.5))
        loss: Tensor = model(torch.ones(1, 4)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        made[0].step()
        return loss

    amp_core.compare(step, "cpu")
    assert made[0].last_epoch == 0
    step()
    assert made[0].get_last_lr() == [0.5]
