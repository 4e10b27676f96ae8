"""When a scope leaves small weights to torch's kernels, and that nobody notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import amp_core
from amp_core import autocast, cached_casts, master_weights
from amp_core._torch.op_kernels import POLICIES
from amp_core.casts import reuse
from amp_core.dispatch.engine import engine

X = torch.linspace(-1, 1, 36).reshape(6, 6)
SCOPES = pytest.mark.parametrize("scope", [cached_casts, master_weights])


@pytest.fixture(autouse=True)
def small_weights_are_large() -> None:
    """Let small weights be small here."""


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 6))


def forward(model: nn.Module, region: Callable[..., Any] = autocast) -> torch.Tensor:
    with region("cpu", dtype=torch.bfloat16):
        return model(X)


def is_served() -> bool:
    """Return whether matrix products run through a kernel in Python."""
    return bool(engine("cpu")._users["aten::linear.default"])


def steps(
    model: nn.Module, fused: bool, micro_batches: int, region: Callable[..., Any] = autocast
) -> Iterator[None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    while True:
        for _ in range(micro_batches):
            forward(model, region).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


@SCOPES
@pytest.mark.parametrize("region", [autocast, torch.autocast])
@pytest.mark.parametrize("fused", [True, False])
def test_plain_steps_of_a_small_model_are_left_to_torch(scope: Any, fused: bool, region: Any) -> None:
    """A small model that steps after each region pays for kernels in Python, and gains nothing."""
    model = make()
    plain, accumulating = (steps(model, fused, count, region) for count in (1, 3))
    with scope(model) as casts:
        for _ in range(3):
            next(plain)
            assert not is_served()
        next(accumulating)
        assert is_served()
        forward(model)
        assert casts.nbytes() == 2 * (36 + 6 + 36 + 6)
        next(accumulating)
        next(plain)
        assert is_served()
        next(plain)
        assert not is_served()
        assert casts.nbytes() == 0
        next(accumulating)
        forward(model)  # what is served again is kept again
        assert casts.nbytes() == 2 * (36 + 6 + 36 + 6)
    assert not is_served()


@SCOPES
def test_what_gains_from_the_first_region_on_is_served_at_once(scope: Any) -> None:
    """A server casts the weights of its first requests twice; or frozen ones are cast at each use."""
    for change in (nn.Module.eval, lambda model: model[0].requires_grad_(False)):
        model = make()
        change(model)
        with scope(model):
            assert is_served()
    with torch.no_grad(), scope(make()):
        assert is_served()
    with scope(make(), debug=True):
        assert is_served()


@SCOPES
def test_a_region_without_gradients_starts_it(scope: Any) -> None:
    """Evaluation between steps casts the weights once more than it needs to."""
    model = make()
    with scope(model):
        next(steps(model, False, 1))
        with torch.no_grad():
            forward(model)
        assert is_served()


@SCOPES
def test_weights_that_are_frozen_later(scope: Any) -> None:
    """The frozen part of a model that becomes an adapter's base is cast at each use."""
    model = make()
    with scope(model):
        next(steps(model, False, 1))
        model[0].requires_grad_(False)
        forward(model)
        assert is_served()


@SCOPES
def test_a_step_of_another_model_is_no_step(scope: Any) -> None:
    """A generator's weights are cast again for each step of its critic."""
    model, other = make(), make()
    critic = steps(other, True, 1)
    with scope(model):
        forward(model)
        next(critic)
        assert is_served()


@SCOPES
def test_a_region_within_a_region_is_no_other(scope: Any) -> None:
    """A region of another dtype inside, or the clearing of casts by a step, counts as a second use."""
    model = make()
    plain = steps(model, True, 1)
    with scope(model):
        for _ in range(3):
            with autocast("cpu", dtype=torch.bfloat16):
                with autocast("cpu", dtype=torch.float16):
                    model(X)
                with autocast("cpu", enabled=False):
                    model(X)
                next(plain)
            assert not is_served()
            with torch.no_grad():
                model[0].weight.add_(1)


@SCOPES
def test_a_torch_without_kernels_in_python_is_refused_at_once(
    scope: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region raises the error when it ends, in the middle of a step."""
    monkeypatch.setattr(POLICIES, "_fault", "has no dispatcher")
    with pytest.raises(amp_core.TorchFeatureError, match="has no dispatcher"):
        scope(make()).__enter__()


def test_a_scope_that_ended_stays_ended() -> None:
    """The region that another scope waits for lets a removed one serve again."""
    model = make()
    cached_casts(model, persistent=True).remove()
    forward(model)
    forward(model)
    assert not is_served()


@SCOPES
def test_several_optimizers_of_one_model(scope: Any) -> None:
    """Each optimizer counts for a step, and the scope ends and begins in each iteration."""
    model = make()
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    with scope(model):
        for number in range(5):
            for _ in range(3):
                forward(model).float().square().sum().backward()
                assert is_served() or not number
            for optimizer in optimizers:
                optimizer.step()


@SCOPES
@pytest.mark.parametrize(("width", "is_trained"), [(6, False), (2**18, True)])
def test_a_part_that_joins_later(scope: Any, width: int, is_trained: bool) -> None:
    """A frozen backbone or a large layer joins a small model, and is cast at each use for good."""
    model = make()
    plain = steps(model, False, 1)
    with scope(model):
        next(plain)
        model.append(nn.Linear(6, width).requires_grad_(is_trained))
        next(plain)
        assert is_served()


def test_the_end_of_a_region_costs_a_served_scope_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each region of the process reads all weights of each model that is served."""
    reads: list[int] = []
    versions = reuse._versions
    monkeypatch.setattr(reuse, "_versions", lambda weights: reads.append(1) or versions(weights))
    with cached_casts(make().eval()):
        for _ in range(5):
            with autocast("cpu"):
                pass
    assert len(reads) <= 2


@SCOPES
def test_a_part_that_was_used_before_it_joins(scope: Any) -> None:
    """A layer that the scope has met as another model's is cast at each use for good."""
    model, other = make().eval(), nn.Linear(6, 6)
    with scope(model) as casts:
        forward(other)
        forward(model)
        before = casts.nbytes()
        model.append(other)
        forward(model)
        assert casts.nbytes() == before + 2 * (36 + 6)
