"""Regions in functions that call themselves until Python's stack is full."""

from __future__ import annotations

import inspect
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import amp_core
from amp_core import OpPolicy, autocast
from amp_core.dispatch import activate
from amp_core.states import region_stack
from tests.drawn import programs

LOW = OpPolicy.default("cpu").override({"softmax": "lower_precision_fp"})
RECIPE = OpPolicy.default("cpu").override({"linear": amp_core.Recipe.mxfp8()})
REGIONS: list[Callable[[], AbstractContextManager[Any]]] = [
    lambda: autocast("cpu"),
    lambda: autocast("cpu", dtype=torch.float16, policy=LOW),
    lambda: autocast("cpu", policy=RECIPE, cache_enabled=False),
    lambda: autocast("cpu", dtype=torch.float32),
    lambda: autocast("cpu", enabled=False),
    amp_core.disable,
]
MODEL = nn.Sequential(nn.Linear(4, 4))
X = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def _unmonitored() -> Iterator[None]:
    """Keep out the callbacks of coverage, which are in Python: a handler of errors has no room for them."""
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is None:  # before Python 3.12
        yield
        return
    events = [event for name, event in vars(monitoring.events).items() if name != "NO_EVENTS"]
    tool = monitoring.COVERAGE_ID
    callbacks = [(event, monitoring.register_callback(tool, event, None)) for event in events]
    yield
    for event, callback in callbacks:
        monitoring.register_callback(tool, event, callback)


def state() -> object:
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    kept = torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    within = nesting, len(region_stack.thread.regions), activate.pushed()
    return torch.is_autocast_enabled("cpu"), kept, within, torch.softmax(X.bfloat16(), -1).dtype


def recursion(draw: random.Random) -> Callable[[int], None]:
    """Return a function that enters a region, computes, and calls itself."""
    makers = draw.choices(REGIONS, k=draw.randint(1, 3))
    shared = [make() for make in makers] if draw.random() < 0.5 else None
    how, computes = draw.choice(["with", "function", "generator"]), draw.random() < 0.3

    def call(depth: int) -> None:
        which = depth % len(makers)
        region: Any = shared[which] if shared else makers[which]()

        def body() -> None:
            if computes:
                MODEL(X)
            call(depth + 1)

        def generator() -> Iterator[None]:
            yield
            body()

        if how == "with":
            with region:
                body()
        elif how == "function":
            region(body)()
        else:
            for _ in region(generator)():
                pass

    return call


def test_a_full_stack_leaves_no_region_in_force() -> None:
    """A function recurses without end inside regions with a policy: what follows is in low precision."""
    limit = sys.getrecursionlimit()
    for make in REGIONS:
        with make():
            MODEL(X)
    before = state()
    for draw in programs(seconds=4):
        call, found = recursion(draw), None
        sys.setrecursionlimit(len(inspect.stack()) + draw.randint(60, 120))
        try:
            call(0)
        except Exception as error:
            found = error
        finally:
            sys.setrecursionlimit(limit)
        # Python 3.10 and torch's C++ code may go on with the error set, which Python then wraps.
        assert isinstance(found.__cause__ if isinstance(found, SystemError) else found, RecursionError)
        assert state() == before


def test_a_stack_that_is_full_where_a_scope_is_told_of_the_end_of_a_region() -> None:
    """The region stays on the stack, and the next one, which takes it off, ends a region of torch as well."""
    limit, model = sys.getrecursionlimit(), nn.Linear(4, 4)

    def use() -> None:
        with torch.no_grad(), autocast("cpu"):  # without gradients, the scope begins to serve
            pass

    with amp_core.cached_casts(model):
        use()
    before, stopped = state(), 0
    for room in range(12, 60):
        with amp_core.cached_casts(model):
            sys.setrecursionlimit(len(inspect.stack()) + room)
            found = None
            try:
                use()
            except RecursionError as error:
                found = error
            finally:
                sys.setrecursionlimit(limit)
            frames = traceback.extract_tb(found.__traceback__) if found else ()
            if "_after_region" in [frame.name for frame in frames]:
                stopped += 1
                with torch.autocast("cpu"):
                    use()
                    assert torch.is_autocast_enabled("cpu"), room
            use()
            assert state() == before, room
    assert stopped > 5
