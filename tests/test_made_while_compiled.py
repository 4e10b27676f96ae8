"""Scopes and policies that a compiled function creates: no graph contains how amp-core makes them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import amp_core
from amp_core import (
    AmpWarning,
    OpPolicy,
    Recipe,
    apply_policy,
    autocast,
    cached_casts,
    count_lost_updates,
    delayed_scales,
    guard,
    master_weights,
    watch,
)

Make = Callable[[nn.Module, SGD], Any]
Step = Callable[[Tensor], Tensor]

SCOPES: dict[str, Make] = {
    "apply_policy": lambda model, _: apply_policy(model, {"0": {"linear": "fp32"}, "2": "fp32"}),
    "cached_casts": lambda model, _: cached_casts(model),
    "count_lost_updates": count_lost_updates,
    "delayed_scales": lambda model, _: delayed_scales(model),
    "guard": lambda model, _: guard(model, steps=[1]),
    "kahan": lambda model, optimizer: master_weights(model, optimizer, "kahan"),
    "master_weights": lambda model, _: master_weights(model),
    "watch": lambda model, _: watch(model, every=2),
}
DELAYED = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=4)})


def created(make: Callable[[], Any], run: Step) -> Step:
    def step(x: Tensor) -> Tensor:
        with make():
            return run(x)

    return step


def entered(make: Callable[[], Any], run: Step) -> Step:
    scope = make()

    def step(x: Tensor) -> Tensor:
        with scope:
            return run(x)

    return step


def removed(make: Callable[[], Any], run: Step) -> Step:
    scope = make()

    def step(x: Tensor) -> Tensor:
        result = run(x)
        scope.remove()
        return result

    return step


CASES = [
    *((scope, where) for where in (created, entered) for scope in SCOPES),
    *((scope, removed) for scope in SCOPES if scope != "delayed_scales"),  # which has no remove()
]


@pytest.mark.parametrize(("scope", "where"), CASES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by torch, when it is imported or compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # by Dynamo, of results between graphs
def test_a_scope_in_a_compiled_function(scope: str, where: Callable[..., Step]) -> None:
    """Dynamo would trace how a scope begins: slowly, with warnings, up to its limit, or into an error."""

    def train(compile: Callable[[Step], Step]) -> list[Tensor]:  # noqa: A002
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = SGD(model.parameters(), lr=0.125)  # a power of 2: compiled, torch 2.11 rounds once

        def run(x: Tensor) -> Tensor:
            with autocast("cpu", policy=DELAYED if scope == "delayed_scales" else None):
                result = model(x)
            result.float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return result

        step = compile(where(lambda: SCOPES[scope](model, optimizer), run))
        times = 1 if where is entered else 2
        return [*(step(torch.ones(2, 4)).detach() for _ in range(times)), *model.parameters()]

    expected = train(lambda step: step)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        found = train(torch.compile(backend="aot_eager"))
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(expected, found, strict=True))


POLICIES: dict[str, Callable[[], Any]] = {
    "backends": lambda: sorted(amp_core.backends()),
    "default": lambda: OpPolicy.default("cpu"),
    "diff": lambda: str(DELAYED.diff(OpPolicy.float32("cpu"))),
    "explain": lambda: str(DELAYED.explain("linear")),
    "from_toml": lambda: OpPolicy.from_toml(DELAYED.to_toml()),
    "override": lambda: DELAYED.override({"mm": "fp32"}),
    "uniform": lambda: OpPolicy.uniform("cpu"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_of_a_compiled_function(name: str) -> None:
    """Dynamo would trace how a policy is made: with warnings of functions that it knows nothing of."""

    def run(x: Tensor) -> tuple[Tensor, Any]:
        return x + 1, POLICIES[name]()

    torch._dynamo.reset()
    assert torch.compile(run, backend="eager")(torch.ones(1))[1] == run(torch.ones(1))[1]


def test_the_place_of_what_a_compiled_function_does_wrong() -> None:
    """A warning, or the origin of a rule, would name a line of Dynamo."""
    model = nn.Linear(2, 2)

    def run(x: Tensor) -> tuple[Tensor, OpPolicy]:
        scales = delayed_scales(model)
        scales.load_state_dict({})
        return x + 1, OpPolicy.default("cpu").override({"mm": "fp32"})

    torch._dynamo.reset()
    with pytest.warns(AmpWarning, match="start anew") as warned:
        _, policy = torch.compile(run, backend="eager")(torch.ones(1))
    ours = [warning.filename for warning in warned if issubclass(warning.category, AmpWarning)]
    assert ours == [__file__]
    assert f"override at {__file__}:" in str(policy.explain("mm"))


def test_scopes_do_not_load_dynamo() -> None:
    """Each program that casts weights once, or guards its model, would take two seconds longer to start."""
    program = """
import sys, torch, amp_core
model = torch.nn.Linear(2, 2)
with amp_core.cached_casts(model), amp_core.apply_policy(model, {"": "fp32"}), amp_core.guard(model) as guard:
    assert "torch._dynamo" not in sys.modules
guard.remove()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
