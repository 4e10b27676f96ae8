"""Loops over what a user makes: after each round, as many objects are alive as before it."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_core
from amp_core import GradScaler, OpPolicy, PrecisionPlan, Recipe, apply_policy, autocast, cached_casts

pytestmark = pytest.mark.filterwarnings("ignore::amp_core.EmulationWarning")

CPU = OpPolicy.default("cpu")
X = torch.ones(4, 8)
PLAN = """
device_type = "cpu"
[modules]
"0" = "fp32"
"""


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def policy(rule: Any = "fp32") -> OpPolicy:
    return CPU.override({"linear": rule})


OWN = policy()


def train(net: nn.Module, rule: Any = "fp32") -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with autocast("cpu", policy=policy(rule)):
        loss = net(X).float().sum()
    loss.backward()
    optimizer.step()


def nested_regions() -> None:
    with autocast("cpu", policy=policy()), amp_core.disable(), autocast("cpu", torch.float16):
        X @ X.t()


def region_in_a_thread() -> None:
    thread = threading.Thread(target=nested_regions)
    thread.start()
    thread.join()


def cached() -> None:
    net = model()
    with cached_casts(net):
        train(net, Recipe.mxfp8())


def persistent() -> None:
    net = model()
    handle = cached_casts(net, persistent=True)
    train(net)
    handle.remove()


def master_weights() -> None:
    net = model()
    with amp_core.master_weights(net):
        train(net)


def delayed() -> None:
    net = model()
    with amp_core.delayed_scales(net):
        train(net, Recipe.fp8_delayed(history=2))


def plan() -> None:
    net = model()
    with PrecisionPlan.from_toml(PLAN).apply(net):
        train(net)


def scaler() -> None:
    net = model()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), GradScaler("cpu")
    scaler.scale(net(X).sum()).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()


def observers() -> None:
    net = model()
    with amp_core.record(), amp_core.guard(net), amp_core.watch(net):
        train(net)


def compiled_under_a_module_policy() -> None:
    net = model()
    torch._dynamo.reset()
    with apply_policy(net, {"0": {"linear": "fp32"}}), autocast("cpu"):
        torch.compile(net, backend="eager")(X)


def compiled_region() -> None:
    net = model()
    torch._dynamo.reset()

    def step(x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", policy=OWN):
            return net(x)

    torch.compile(step, backend="eager")(X)


def alive(kinds: tuple[type, ...]) -> Counter[str]:
    """Count our objects, and those of `kinds`."""
    gc.collect()
    return Counter(
        kind.__qualname__
        for kind in map(type, gc.get_objects())
        if str(kind.__module__).startswith("amp_core") or issubclass(kind, kinds)
    )


@pytest.mark.parametrize(
    "round_",
    [
        nested_regions,
        region_in_a_thread,
        cached,
        persistent,
        master_weights,
        delayed,
        plan,
        scaler,
        observers,
        compiled_under_a_module_policy,
        compiled_region,
    ],
    ids=lambda round_: round_.__name__,
)
def test_rounds_leave_nothing(round_: Callable[[], None]) -> None:
    """A program that makes models, policies or compiled graphs in a loop runs out of memory."""
    for _ in range(3):
        round_()
    # What torch keeps of the graphs that it compiled is not ours.
    kinds = () if "compiled" in round_.__name__ else (torch.Tensor, nn.Module)
    before = alive(kinds)
    for _ in range(4):
        round_()
    assert alive(kinds) - before == Counter()


class Held:
    """Something that weak references can tell is gone."""


def plain(body: Callable[..., Any]) -> Any:
    return body


DECORATORS = pytest.mark.parametrize("decorate", [plain, autocast("cpu"), amp_core.disable()])


@DECORATORS
def test_a_generator_keeps_nothing_that_it_has_passed_on(decorate: Any) -> None:
    """A decorated generator keeps each tensor that it has yielded, or was sent, until its next step."""
    seen: list[weakref.ref[Held]] = []

    @decorate
    def body() -> Any:
        seen.append(weakref.ref((yield Held())))
        yield 0

    generator = body()
    seen.append(weakref.ref(next(generator)))
    generator.send(Held())
    assert [each() for each in seen] == [None, None]


@DECORATORS
def test_an_async_generator_keeps_nothing_that_it_has_passed_on(decorate: Any) -> None:
    """A decorated async generator keeps each tensor that it has yielded until its next step."""

    @decorate
    async def body() -> Any:
        yield Held()
        yield 0

    generator = body()
    with pytest.raises(StopIteration) as stopped:
        generator.__anext__().send(None)
    seen = weakref.ref(stopped.value.value)
    del stopped
    assert seen() is None


@DECORATORS
def test_an_error_thrown_into_a_generator_leaves_no_circle(decorate: Any) -> None:
    """All tensors of the frames that an error went through wait for the garbage collector."""

    @decorate
    def body(held: Held) -> Any:
        yield held

    def run() -> weakref.ref[Held]:
        held = Held()
        generator = body(held)
        next(generator)
        with contextlib.suppress(ValueError):
            generator.throw(ValueError())
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()
