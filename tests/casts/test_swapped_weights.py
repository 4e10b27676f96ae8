"""`torch.utils.swap_tensors` on weights, as `.to()` and `load_state_dict` use it when torch is asked to."""

from __future__ import annotations

import copy
import gc
import weakref
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


@pytest.mark.parametrize("change", ["the same memory", "there and back in bfloat16", "load"])
@pytest.mark.parametrize("storage", ["remainder", "kahan", "stochastic"])
def test_stored_weights_are_swapped(storage: Any, change: str) -> None:
    """A move of the model, as DTensors always swap, fails or drops what is kept, or a load keeps it."""
    results = []
    for swaps in (False, True):
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        model = make().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with master_weights(model, optimizer, storage) as stored:
            for _ in range(3):
                STORED_CHANGES[change](model)
                model(X.bfloat16()).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(stored.float32_weights())
    assert results[0].keys() == {*make().state_dict()}
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


STORED_CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "the same memory": CHANGES["the same memory"],
    "there and back in bfloat16": lambda model: model.float().bfloat16(),
    "load": CHANGES["load"],
}


def test_stored_weights_that_leave_are_freed() -> None:
    """What has left the optimizer and the model stays in memory as long as the handle."""
    model = make()
    optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in (model[0], model[2])], lr=0.1)
    with master_weights(model, optimizer, "remainder") as stored:
        model(X.bfloat16()).float().square().mean().backward()
        optimizer.step()
        gone = [weakref.ref(param) for param in model[2].parameters()]
        for param in model[2].parameters():
            del optimizer.state[param]
        del model[2], optimizer.param_groups[1], param
        optimizer.step()
        gc.collect()
        assert [ref() for ref in gone] == [None, None]
        assert stored.float32_weights().keys() == {"0.weight", "0.bias"}
