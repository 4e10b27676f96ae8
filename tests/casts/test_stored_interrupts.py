"""Steps on stored weights that a signal breaks off."""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_core import count_lost_updates, master_weights
from amp_core.casts import last_writes, shards, stand_ins, storage, stored

FILES = {module.__file__ for module in (last_writes, shards, stand_ins, storage, stored)}


def make(storage: Any) -> tuple[nn.ParameterDict, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(6)) for name in "ab"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, master_weights(model, optimizer, storage) if storage else None


def step(model: nn.ParameterDict, optimizer: torch.optim.Optimizer) -> None:
    for param in model.values():
        param.grad = torch.ones_like(param)
    optimizer.step()


def interrupted_at(number: int, model: nn.ParameterDict, optimizer: torch.optim.Optimizer) -> bool:
    """Take a step that is broken off at a line of that number; return whether it has so many.

    Python looks for signals where a function begins or returns, so at no other line of `_step_bucket`.
    """
    count = 0

    def tracer(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name == "_step_bucket":
            return None
        count += event in ("call", "line")
        if count == number:
            sys.settrace(None)
            raise KeyboardInterrupt
        return tracer

    sys.settrace(tracer)
    try:
        step(model, optimizer)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("storage", ["remainder", "stochastic", "kahan"])
def test_a_step_that_is_broken_off_leaves_everything_to_the_optimizer(storage: Any) -> None:
    """After Ctrl-C the optimizer has copies for parameters: it saves nothing, and has lost their momentum."""
    for number in itertools.count(1):
        model, optimizer, masters = make(storage)
        step(model, optimizer)
        before = masters.float32_weights()
        is_broken_off = interrupted_at(number, model, optimizer)
        twin, its_optimizer, its_masters = make(storage)
        for _ in range(2):
            step(twin, its_optimizer)
        now, after = masters.float32_weights(), its_masters.float32_weights()
        if not is_broken_off:
            break
        assert all(
            torch.equal(now[name], before[name]) or torch.equal(now[name], after[name]) for name in now
        )
        (group,) = optimizer.state_dict()["param_groups"]
        assert len(group["params"]) == 2
        momenta: list[Tensor] = [optimizer.state[param]["momentum_buffer"] for param in model.values()]
        assert all((each >= 1.0).all() for each in momenta)
    assert number > 50


def test_a_count_that_is_broken_off_leaves_the_optimizer_its_parameters() -> None:
    """After Ctrl-C the optimizer steps on the copies for which updates were counted, in silence."""
    for number in itertools.count(1):
        model, optimizer, _ = make(None)
        model.bfloat16()
        groups = optimizer.param_groups
        count_lost_updates(model, optimizer)
        if not interrupted_at(number, model, optimizer):
            break
        assert optimizer.param_groups is groups
        assert all(map(torch.equal, groups[0]["params"], model.values()))
    assert number > 10
