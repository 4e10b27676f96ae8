"""`cached_casts` and `master_weights` under transforms, tracers, and before a model has memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_core import OpPolicy, Recipe, autocast, cached_casts, master_weights

X = torch.linspace(-1, 1, 24).reshape(4, 6)
SCOPES = pytest.mark.parametrize("scope", [cached_casts, master_weights])
Scope = Callable[[nn.Module], Any]


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def plain(_model: nn.Module) -> Any:
    return nullcontext()


def low(model: nn.Module, *args: Any) -> Any:
    with autocast("cpu"):
        return model(*args)


def vmapped(model: nn.Module) -> Tensor:
    return low(torch.vmap(model), X)


def vmapped_over_weights(model: nn.Module) -> Tensor:
    stacked = {name: torch.stack([p, p * 0.5]) for name, p in model.named_parameters()}
    return low(torch.vmap(lambda p: torch.func.functional_call(model, p, (X,))), stacked)


def gradient_of_input(model: nn.Module) -> Tensor:
    loss = torch.func.grad(lambda x: model(x).float().square().sum())
    return torch.stack([low(loss, X), low(loss, X)])


def tangent(model: nn.Module) -> Tensor:
    return low(lambda x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1], X)


def forward_mode(model: nn.Module) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        return torch.autograd.forward_ad.unpack_dual(low(model, dual)).tangent


def jagged(model: nn.Module) -> Tensor:
    nested = torch.nested.nested_tensor([X[:1], X[1:]], layout=torch.jagged)
    return low(model, nested).values()


@SCOPES
@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch's own forward mode
@pytest.mark.parametrize(
    "compute", [vmapped, vmapped_over_weights, gradient_of_input, tangent, forward_mode, jagged]
)
@pytest.mark.parametrize("policy", [False, True])
def test_transforms(compute: Callable[[nn.Module], Tensor], policy: bool, scope: Scope) -> None:
    """A cast of one level of a transform meets tensors of another: an error, or another dtype."""
    rules = OpPolicy.default("cpu").override({"tanh": "lower_precision_fp"}) if policy else None
    model = make()
    with autocast("cpu", policy=rules):
        expected = compute(model)
    with scope(model), autocast("cpu", policy=rules):
        low(model, X)  # there are casts to take
        got, again = compute(model), compute(model)
    assert got.dtype is expected.dtype
    assert torch.equal(got, expected)
    assert torch.equal(again, expected)


class Inside(nn.Module):
    """A model with its region, as tracers want it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", cache_enabled=False):
            return self.model(x)


@SCOPES
@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize(
    "trace",
    [lambda f: torch.jit.trace(f, (X,)), lambda f: torch.fx.experimental.proxy_tensor.make_fx(f)(X)],
    ids=["jit", "make_fx"],
)
def test_a_graph_holds_no_cast(trace: Any, scope: Scope) -> None:
    """A traced model goes on with the weights of the day it was traced."""
    model = make().requires_grad_(False)
    inside = Inside(model)
    with scope(model):
        inside(X)
        traced = trace(inside)
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    assert torch.equal(traced(X), inside(X))


@SCOPES
def test_a_model_on_the_meta_device(scope: Scope) -> None:
    """A scope over a model that gets its memory later fails, or never caches a cast."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    with scope(model) as handle:
        with torch.autocast("cpu"):
            assert model(X.to("meta")).device.type == "meta"
        model.to_empty(device="cpu")
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(0.1)
        assert low(model, X).dtype is torch.bfloat16
        assert handle.nbytes() > 0


@SCOPES
def test_fake_tensors_leave_no_fake_casts(scope: Scope) -> None:
    """A forward pass that only asks for shapes fails, or later ones compute with its fake casts."""
    model = make()
    expected = low(model, X)
    with scope(model), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert low(model, mode.from_tensor(X)).dtype is torch.bfloat16
    with scope(model):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            low(model, mode.from_tensor(X))
        assert torch.equal(low(model, X), expected)


class Tagged(Tensor):
    """A subclass with nothing of its own."""


@SCOPES
@pytest.mark.filterwarnings("ignore:This scope leaves")
def test_a_subclass_as_weight(scope: Scope) -> None:
    """Its ops see another type of weight in the scope than in a plain region."""
    model = make()
    model[0].weight = nn.Parameter(torch.randn(5, 6).as_subclass(Tagged))
    expected = low(model, X)
    with scope(model):
        got = low(model, X)
    assert type(got) is type(expected)
    assert got.dtype is expected.dtype
    assert torch.equal(got, expected)


@SCOPES
def test_a_float32_region_needs_no_casts(scope: Scope) -> None:
    """A float32 region crashes in a scope, or the scope keeps float32 copies of float32 weights."""
    model = make()
    with scope(model) as casts, autocast("cpu", dtype=torch.float32):
        result = model(X)
        result.sum().backward()
        assert casts.nbytes() == 0
    assert torch.equal(result, model(X))


@pytest.mark.parametrize("recipe", [None, Recipe.mxfp8()])
@pytest.mark.parametrize("width", [5, 300])
@SCOPES
@pytest.mark.filterwarnings("ignore::UserWarning")  # by torch, of what it runs outside of its graphs
def test_compiled_autograd_gives_the_gradients(scope: Scope, width: int, recipe: Recipe | None) -> None:
    """Compiled autograd sets ``.grad`` to None where a scope has added the gradient to it, or fails."""
    policy = OpPolicy.default("cpu").override({} if recipe is None else {"linear": recipe})

    def gradients(scope: Scope, backward: Callable[[], Any]) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width))
        with scope(model), backward():
            for _ in range(2):
                model.zero_grad()
                with autocast("cpu", policy=policy):
                    loss = model(X).float().square().sum()
                loss.backward()
                torch.optim.SGD(model.parameters()).step()
        return [p.grad for p in model.parameters()]

    def compiled() -> Any:
        return torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))

    torch._dynamo.reset()
    for wanted, got in zip(gradients(plain, nullcontext), gradients(scope, compiled), strict=True):
        assert wanted is not None
        assert got is not None
        assert torch.equal(wanted, got)
