"""`torch.utils.swap_tensors` on weights, as `.to()` and `load_state_dict` use it when torch is asked to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_core
from amp_core import GradScaler, autocast, cached_casts, master_weights

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def swap(model: nn.Module) -> None:
    for weight in model.parameters():
        torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 2))


def other_weights() -> dict[str, Tensor]:
    return make(5).state_dict()


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "the same memory": lambda model: model.to(memory_format=torch.contiguous_format),
    "there and back": lambda model: model.half().float(),
    "to bfloat16": lambda model: model.bfloat16(),
    "load": lambda model: model.load_state_dict(other_weights()),
    "assign": lambda model: model.load_state_dict(other_weights(), assign=True),
    "assign the same": lambda model: model.load_state_dict(model.state_dict(), assign=True),
    "meta": lambda model: (
        model.to("meta"),
        model.to_empty(device="cpu"),
        model.load_state_dict(other_weights()),
    ),
    "swap": swap,
}
OBSERVERS: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "none": lambda _: nullcontext(),
    "cached_casts": cached_casts,
    "debug": lambda model: cached_casts(model, debug=True),
    "master_weights": master_weights,
    "scope of another model": lambda _: cached_casts(make(9)),
    "masters of another model": lambda _: master_weights(make(9)),
    "record": lambda _: amp_core.record(),
    "guard": amp_core.guard,
    "watch": lambda model: amp_core.watch(model, every=1),
}


def results(change: str, observer: str, stepped: bool) -> list[Tensor]:
    """Return what a model computes, and its gradients, after its weights were swapped."""
    model = make()
    with OBSERVERS[observer](model):
        run(model).backward()
        if stepped:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        CHANGES[change](model)
        loss = run(model)
        loss.backward()
        with torch.inference_mode():
            quiet = run(model)
        return [loss.detach(), quiet, *(copy.copy(weight.grad) for weight in model.parameters())]


def run(model: nn.Sequential) -> Tensor:
    with autocast("cpu", dtype=torch.bfloat16):
        return model(X.to(model[0].weight.dtype)).float().square().mean()


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_swapped_weight_is_a_new_weight(change: str, observer: str, stepped: bool) -> None:
    """A cast of the old tensor has a poisoned node; a weak reference to a weight forbids the swap."""
    expected = results(change, "none", stepped)
    for found, wanted in zip(results(change, observer, stepped), expected, strict=True):
        assert found.dtype is wanted.dtype
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_swapped_gradient_is_a_new_gradient(observer: str) -> None:
    """A weak reference to a gradient forbids the swap: `.to()` swaps those of the weights, too."""
    expected = None
    for each in ("none", observer):
        model = make()
        with OBSERVERS[each](model):
            run(model).backward()
            model.bfloat16().float()
        found = [copy.copy(weight.grad) for weight in model.parameters()]
        expected = found if expected is None else expected
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_scaler_steps_swapped_weights(overlap: bool) -> None:
    """The hooks of `overlap=True` stay with the tensor that was swapped away, or forbid the swap."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = GradScaler("cpu", init_scale=1.0, overlap=overlap)
    plain, torchs = make(), GradScaler("cpu", init_scale=1.0)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, fused=True)
    for number in range(6):
        for net, step, each in ((model, optimizer, scaler), (plain, theirs, torchs)):
            net.zero_grad()
            each.scale(run(net)).backward()
            each.step(step, max_norm=0.1)
            each.update()
            if number == 2:
                net.to(memory_format=torch.contiguous_format)
    for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, other)


def test_parameters_without_storage_pass_by() -> None:
    """A scope that remembers foreign weights by their memory fails on those that have none."""
    foreign = nn.Parameter(torch.eye(8).to_sparse())
    with cached_casts(make()), autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(torch.mm(foreign, X.t()), X.t().bfloat16())
