"""Steps on stored weights that a signal breaks off."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
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


def interrupted_at(number: int, function: Callable[..., None], *args: Any) -> bool:
    """Call `function`, but break it off at the line of that number; return whether it has so many.

    Python looks for signals where a function begins or returns, so at no other line of `_step_bucket`. What
    finalisers raise, which are lambdas, it ignores.
    """
    count = 0

    def tracer(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name in ("_step_bucket", "<lambda>"):
            return None
        count += event in ("call", "line")
        if count == number:
            sys.settrace(None)
            raise KeyboardInterrupt
        return tracer

    sys.settrace(tracer)
    try:
        function(*args)
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
        is_broken_off = interrupted_at(number, step, model, optimizer)
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
        if not interrupted_at(number, step, model, optimizer):
            break
        assert optimizer.param_groups is groups
        assert all(map(torch.equal, groups[0]["params"], model.values()))
    assert number > 10


def test_a_removal_that_is_broken_off_is_ended_by_the_next_one() -> None:
    """After Ctrl-C the optimizer steps on float32 copies for ever, and saves what it keeps as integers."""
    for number in itertools.count(1):
        model, optimizer, masters = make("remainder")
        step(model, optimizer)
        is_broken_off = interrupted_at(number, masters.remove)
        masters.remove()
        assert not {"step", "load_state_dict"} & vars(optimizer).keys()
        momenta = [state.popitem() for state in optimizer.state.values()]
        assert [(name, value.dtype) for name, value in momenta] == 2 * [("momentum_buffer", torch.bfloat16)]
        assert not any(optimizer.state.values())
        if not is_broken_off:
            break
    assert number > 20
