"""Casts of weights that rules in Python keep for a region: once per region, and gone afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import amp_core
from amp_core import OpPolicy
from amp_core.common.containers import map_tensors

pytestmark = pytest.mark.usefixtures("nothing_left")
CPU = OpPolicy.default("cpu")
X = torch.randn(8, 8)
HIGH = torch.float32


def test_weight_casts_are_cached_as_in_torch(region) -> None:
    """Without the cache a weight used twice is cast twice, and its gradient history grows."""
    weight = torch.randn(8, 8, requires_grad=True)
    frozen = torch.randn(8, 8)
    seen = []

    @torch.library.custom_op("amp_policy_test::look", mutates_args=())
    def look(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        seen.append(w.detach())  # kept: freed memory may serve the next cast
        return x + w

    def same(one: int, other: int) -> bool:
        return seen[one].data_ptr() == seen[other].data_ptr()

    look.register_fake(lambda x, w: x + w)
    look.register_autograd(lambda ctx, g: (g, g), setup_context=lambda ctx, inputs, output: None)
    policy = CPU.override({look: "lower_precision_fp"})
    with region(policy):
        kept = [look(X, weight), look(X, weight)]
        assert same(0, 1)
        with torch.no_grad():
            weight.add_(1)
        kept.append(look(X, weight))
        assert not same(2, 0)
        kept += [look(X, frozen), look(X, frozen)]
        assert not same(3, 4)
    sum(k.float().sum() for k in kept[:3]).backward()
    assert weight.grad.dtype is HIGH
    assert torch.equal(weight.grad, torch.full((8, 8), 3.0))


@pytest.mark.parametrize("rule", ["native", "lower_precision_fp above 1 FLOP", "low_in_fp32_out"])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_region_without_a_cache_casts_weights_at_each_use(rule: str, keeps: bool) -> None:
    """With ``cache_enabled=False`` an op with a rule in Python misses what is written to ``weight.data``."""
    weight = torch.ones(8, 8, requires_grad=True)
    with amp_core.autocast("cpu", policy=CPU.override({"linear": rule}), cache_enabled=keeps):
        before = torch.nn.functional.linear(X, weight)
        weight.data.mul_(2)
        after = torch.nn.functional.linear(X, weight)
    assert torch.equal(after, before if keeps else 2 * before)


class OwnParameter(torch.nn.Parameter):
    """A parameter of another class."""


class Boxed(torch.Tensor):
    """A tensor that computes with the one that it holds, as quantised weights do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Boxed:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_tensors((args, kwargs or {}), unboxed)
        result = func(*args, **kwargs)
        keeps = func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default)
        return cls(result) if keeps else result


def unboxed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.inner if isinstance(tensor, Boxed) else tensor


@pytest.mark.parametrize("make", [OwnParameter, lambda data: torch.nn.Parameter(Boxed(data))])
def test_casts_of_weights_of_other_types_are_kept_as_in_torch(
    make: Callable[[torch.Tensor], torch.nn.Parameter],
) -> None:
    """The gradients of several uses are summed in float32, and each use casts the weight."""

    def gradient(region: Any) -> torch.Tensor:
        torch.manual_seed(0)
        weight, inputs = make(torch.randn(8, 8)), torch.randn(5, 3, 8)
        with region:
            loss = sum(torch.nn.functional.linear(x, weight).float().sin().sum() for x in inputs)
        loss.backward()
        return unboxed(weight.grad)

    policy = CPU.override({"linear": "lower_precision_fp above 1 FLOP"})
    wanted = gradient(torch.autocast("cpu"))
    assert not torch.equal(wanted, gradient(torch.autocast("cpu", cache_enabled=False)))
    assert torch.equal(gradient(amp_core.autocast("cpu", policy=policy)), wanted)


def test_memory_that_a_weight_leaves_is_freed(region) -> None:
    """A region keeps the memory of every layer that a wrapper moves in for its forward pass."""
    weight = torch.nn.Parameter(torch.randn(8, 8))
    with region(CPU.override({"softmax": "lower_precision_fp"})):
        torch.softmax(weight, -1)
        left = weakref.ref(weight.untyped_storage())
        weight.data = torch.randn(8, 8)
        assert left() is None


def hook_at_once(model: torch.nn.Module) -> Any:
    return model.weight.register_hook(lambda grad: None)


def watch_every_other_call(model: torch.nn.Module) -> Any:
    return amp_core.watch(model, every=2)


@pytest.mark.parametrize("scope", [nullcontext, amp_core.cached_casts])
@pytest.mark.parametrize("observe", [hook_at_once, watch_every_other_call])
def test_a_weight_that_gains_or_loses_a_hook_keeps_its_cast(
    observe: Callable[[torch.nn.Module], Any], scope: Callable[[torch.nn.Module], object]
) -> None:
    """The gradients of two uses are summed in float32, not as without the hook: watching changes training."""

    def gradient(observed: Callable[[torch.nn.Module], Any] | None, first: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8).eval()
        inputs, handles = torch.randn(2, 16, 8), []
        with scope(model), amp_core.autocast("cpu", torch.bfloat16, policy=policy):
            if observed is not None and first:
                handles.append(observed(model))
            results = [model(inputs[0])]
            if observed is not None and not first:
                handles.append(observed(model))
            results.append(model(inputs[1]))
        sum(r.float().square().sum() for r in results).backward()
        for handle in handles:
            handle.remove()
        return model.weight.grad

    policy = CPU.override({"linear": "low_in_fp32_out"})
    wanted = gradient(None, first=True)
    for first in (True, False):
        assert torch.equal(gradient(observe, first), wanted)


@pytest.mark.parametrize("outer", [torch.autocast, amp_core.autocast])
def test_casts_live_until_the_outermost_region_ends(outer) -> None:
    """A weight is cast again after each inner region with a policy, or its cast is never freed."""
    weight, casts = torch.randn(8, 8, requires_grad=True), []

    @torch.library.custom_op("amp_policy_test::keep_cast", mutates_args=())
    def keep_cast(w: torch.Tensor) -> torch.Tensor:
        casts.append(weakref.ref(w.untyped_storage()))
        return w.sum()

    keep_cast.register_fake(lambda w: w.sum())
    policy = CPU.override({keep_cast: "lower_precision_fp"})
    with outer("cpu"):
        for _ in range(2):
            with amp_core.autocast("cpu", policy=policy):
                keep_cast(weight)
        assert casts[0]() is casts[1]() is not None
    assert casts[0]() is None


def test_casts_of_added_rules_end_with_the_region() -> None:
    """A weight of a grouped product, which torch has no rule for, and its cast outlive region and model."""
    x, offsets = torch.randn(4, 16), torch.tensor([2, 4], dtype=torch.int32)
    weights = torch.nn.Parameter(torch.randn(2, 16, 16))
    with amp_core.autocast("cpu"):
        torch._grouped_mm(x, weights, offsets).float().sum().backward()
    alive = weakref.ref(weights)
    del weights
    assert alive() is None
