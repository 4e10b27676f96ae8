"""Every feature inside ``with torch.device(...)``: what the library makes for itself names its own device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_core
from amp_core import OpPolicy, autocast

X = torch.linspace(-1, 1, 24).reshape(4, 6)
LOW = OpPolicy.default("cpu").override({"softmax": "lower_precision_fp", "mm": "fp32"})


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Softmax(-1), nn.Linear(8, 3))


def trained(model: nn.Module, policy: OpPolicy | None = None, scaler: Any = None) -> list[Tensor]:
    # Adam of torch 2.11 makes its step counters on the default device.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(2):
        with autocast("cpu", policy=policy):
            loss = model(X).float().square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        (optimizer.step if scaler is None else lambda: scaler.step(optimizer))()
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad()
    return [loss.detach(), *(p.detach().clone() for p in model.parameters())]


def in_scope(name: str, **options: Any) -> Callable[[nn.Module], Any]:
    def run(model: nn.Module) -> Any:
        with getattr(amp_core, name)(model, **options):
            return trained(model)

    return run


def recorded(model: nn.Module) -> Any:
    with amp_core.record() as r:
        trained(model, LOW)
    return sorted(map(str, r.ops.items()))


def step_of(model: nn.Module) -> Callable[[], Tensor]:
    return lambda: model(X).float().square().mean()


def compared(model: nn.Module) -> Any:
    return [(d.key, d.error, d.largest) for d in amp_core.compare(step_of(model), "cpu").differences]


def advised(model: nn.Module) -> Any:
    return amp_core.advise(step_of(model), "cpu", dtype=torch.float16, progress=False).init_scale


def guarded(model: nn.Module) -> Any:
    with amp_core.guard(model, steps=[0]):
        return trained(model)


def watched(model: nn.Module) -> Any:
    with amp_core.watch(model, every=1) as ranges:
        trained(model)
    return str(ranges)


def loaded(model: nn.Module) -> Any:
    first, second = (amp_core.GradScaler("cpu", 64.0, growth_interval=1) for _ in range(2))
    trained(model, None, first)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    return [trained(model, None, second), second.state_dict()]


def keyed(model: nn.Module) -> Any:
    scaler = amp_core.GradScaler("cpu", 64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with autocast("cpu"):
        loss = model(X).float().square().mean()
    scaler.scale(loss, key="g").backward()
    norm = scaler.clip_grad_norm_(optimizer, 0.1, key="g")
    scaler.step(optimizer, key="g")
    scaler.update()
    return [norm, scaler.state_dict(), *(p.detach() for p in model.parameters())]


def with_closure(model: nn.Module) -> Any:
    scaler = amp_core.GradScaler("cpu", 64.0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with autocast("cpu"):
            loss = model(X).float().square().mean()
        scaler.scale(loss).backward()
        return loss

    scaler.step_closure(optimizer, closure)
    scaler.update()
    return [p.detach() for p in model.parameters()]


class Square(torch.autograd.Function):
    @staticmethod
    @amp_core.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @amp_core.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


FEATURES: dict[str, Callable[[nn.Module], Any]] = {
    "region": trained,
    "policy": lambda model: trained(model, LOW),
    "float32 region": lambda model: [autocast("cpu", torch.float32)(model)(X).detach()],
    "scaler": lambda model: trained(model, None, amp_core.GradScaler("cpu", 64.0)),
    "keys": keyed,
    "closure": with_closure,
    "state": loaded,
    "custom function": lambda model: [autocast("cpu")(Square.apply)(model(X)).detach()],
    "cached_casts": in_scope("cached_casts"),
    "master_weights": in_scope("master_weights"),
    "record": recorded,
    "compare": compared,
    "advise": advised,
    "guard": guarded,
    "watch": watched,
}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.device == other.device and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    return bool(one == other)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("mode", ["block", "global"])
def test_the_default_device_does_not_matter(feature: str, mode: str) -> None:
    """A tensor made without a device lands on the default one: an error, a crash, or another result."""
    run = FEATURES[feature]
    expected = run(make())
    model = make()
    with contextlib.ExitStack() as stack:
        if mode == "block":
            stack.enter_context(torch.device("meta"))
        else:
            torch.set_default_device("meta")
            stack.callback(torch.set_default_device, None)
        found = run(model)
    assert equal(found, expected)
