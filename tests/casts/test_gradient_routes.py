"""Every way to ask autograd for the gradient of a weight, in a scope and without: the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from amp_core import OpPolicy, Recipe, autocast, cached_casts, master_weights
from amp_core.casts import accumulating, bulk

from ..drawn import programs

X = torch.linspace(-1, 1, 24).reshape(4, 6)
Result = list["Tensor | None"]

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")  # of torch's own forward mode and optimizers


@pytest.fixture(autouse=True, params=["alone", "together"])
def small_weights_are_large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scopes cast these small weights each by itself, or like large ones in one kernel call."""
    if request.param == "together":
        monkeypatch.setattr(bulk, "SMALL_ON_HOST", 0)
        monkeypatch.setattr(accumulating, "_BY_AUTOGRAD", 0)
        monkeypatch.setattr(bulk, "_SMALL", 0)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))


def loss_of(model: nn.Module) -> Tensor:
    with autocast("cpu"):
        return model(X).float().square().mean()


def copies(tensors: Any) -> Result:
    return [None if t is None else t.detach().clone() for t in tensors]


def gradients(model: nn.Module) -> Result:
    return copies(p.grad for p in model.parameters())


def backward(model: nn.Module) -> Result:
    loss_of(model).backward()
    return gradients(model)


def some_inputs(model: nn.Module) -> Result:
    loss_of(model).backward(inputs=[model[0].weight, model[3].bias])
    return gradients(model)


def all_inputs(model: nn.Module) -> Result:
    loss_of(model).backward(inputs=list(model.parameters()))
    return gradients(model)


def grad(model: nn.Module) -> Result:
    return [*copies(torch.autograd.grad(loss_of(model), list(model.parameters()))), *gradients(model)]


def grad_of_some(model: nn.Module) -> Result:
    unused = torch.ones(1, requires_grad=True)
    wanted = [model[3].weight, unused, model[0].bias]
    return [*copies(torch.autograd.grad(loss_of(model), wanted, allow_unused=True)), *gradients(model)]


def penalty(model: nn.Module) -> Result:
    loss = loss_of(model)
    (first,) = torch.autograd.grad(loss, [model[0].weight], create_graph=True)
    (loss + first.square().sum()).backward()
    return gradients(model)


def hook_on_the_node(model: nn.Module) -> Result:
    seen: Result = []
    weight = model[0].weight
    node = weight.view_as(weight).grad_fn.next_functions[0][0]
    handle = node.register_hook(lambda *_: seen.extend(copies([weight.grad])))
    loss_of(model).backward()
    handle.remove()
    return [*seen, *gradients(model)]


def hook_after_the_forward(model: nn.Module) -> Result:
    seen: list[Tensor] = []
    loss = loss_of(model)
    handle = model[0].weight.register_hook(seen.append)
    loss.backward()
    handle.remove()
    return [*copies(seen), *gradients(model)]


def twice_through_one_graph(model: nn.Module) -> Result:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def batch(model: nn.Module) -> Result:
    loss = loss_of(model)
    scales = torch.linspace(1, 2, 3)
    return copies(torch.autograd.grad(loss, list(model.parameters()), scales, is_grads_batched=True))


def vmapped(model: nn.Module) -> Result:
    with autocast("cpu"):
        loss = model[3](model[0](X)).float().square().mean()  # torch itself cannot map over a layer norm
    weights = [*model[0].parameters(), *model[3].parameters()]
    grads = torch.func.vmap(lambda scale: torch.autograd.grad(loss, weights, scale, retain_graph=True))
    return copies(grads(torch.linspace(1, 2, 3)))


def frozen_then_not(model: nn.Module) -> Result:
    model[0].requires_grad_(False)
    loss_of(model).backward()
    model[0].requires_grad_(True)
    return [*gradients(model), *backward(model)]


def in_another_dtype_meanwhile(model: nn.Module) -> Result:
    loss_of(model).backward()
    model.double().float()
    return grad(model) + all_inputs(model)


def forward_mode(model: nn.Module) -> Result:
    weight = model[0].weight
    with forward_ad.dual_level():
        with torch.no_grad():
            weight.copy_(forward_ad.make_dual(weight.detach(), torch.ones_like(weight)))
        with autocast("cpu"):
            return copies(forward_ad.unpack_dual(model[0](X)))


ROUTES: list[Callable[[nn.Module], Result]] = [
    backward,
    some_inputs,
    all_inputs,
    grad,
    grad_of_some,
    penalty,
    hook_on_the_node,
    hook_after_the_forward,
    twice_through_one_graph,
    batch,
    vmapped,
    frozen_then_not,
    in_another_dtype_meanwhile,
    forward_mode,
]


def run(routes: list[Callable[[nn.Module], Result]], scope: Callable[[nn.Module], Any]) -> Result:
    model = make()
    results: Result = []
    with scope(model):
        for route in routes:
            results += route(model)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(0.9)
            if len(results) % 2:
                model.zero_grad()
    return results


def check(one: Result, other: Result) -> None:
    for first, second in zip(one, other, strict=True):
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("scope", [cached_casts, master_weights])
@pytest.mark.parametrize("route", ROUTES)
def test_each_route(route: Callable[[nn.Module], Result], scope: Callable[[nn.Module], Any]) -> None:
    """A gradient is lost, or left in ``.grad`` by a call that should only return it."""
    check(run([route] * 2, scope), run([route] * 2, lambda _: nullcontext()))


@pytest.mark.parametrize("scope", [cached_casts, master_weights])
def test_routes_in_any_order(scope: Callable[[nn.Module], Any]) -> None:
    """One route leaves something behind that another trips over."""
    for chance in programs(5.0):
        routes = chance.choices(ROUTES, k=chance.randint(2, 5))
        try:
            check(run(routes, scope), run(routes, lambda _: nullcontext()))
        except BaseException:
            print([route.__name__ for route in routes])  # noqa: T201 - pytest shows it
            raise


@pytest.mark.parametrize("scope", [cached_casts, master_weights])
def test_an_optimizer_in_the_backward_pass_steps(scope: Callable[[nn.Module], Any]) -> None:
    """The model never learns: the hook that steps is on a node that no gradient reaches."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    def train(scope: Callable[[nn.Module], Any]) -> Result:
        model = make()
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        with scope(model):
            for _ in range(3):
                loss_of(model).backward()
        return copies(model.parameters())

    trained = train(scope)
    check(trained, train(lambda _: nullcontext()))
    assert not torch.equal(trained[0], make()[0].weight)


@pytest.mark.parametrize("layer", ["recipe", "channels_last", "large channels_last"])
@pytest.mark.filterwarnings("ignore::amp_core.errors.EmulationWarning")
def test_gradients_have_the_layout_of_their_weight(layer: str) -> None:
    """Fused optimizers read gradients in the order of the weight's memory: others train wrong elements."""
    policy = OpPolicy.default("cpu").override({"linear": Recipe.mxfp8()})

    def stepped(scope: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(6, 5)
        x = torch.randn(4, 6)
        if layer != "recipe":
            width = 128 if "large" in layer else 4
            model = nn.Conv2d(width, width, 3)
            x = torch.randn(2, width, 4, 4).to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        with scope(model):
            with autocast("cpu", policy=policy):
                loss = model(x).float().square().sum()
            loss.backward()
            optimizer.step()
        assert all(p.grad is not None and p.grad.stride() == p.stride() for p in model.parameters())
        return [p.detach() for p in model.parameters()]

    for wanted, got in zip(stepped(lambda _: nullcontext()), stepped(master_weights), strict=True):
        assert torch.equal(wanted, got)
