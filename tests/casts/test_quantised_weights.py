"""Weights that recipes quantise, kept beside their casts: how often, which bits, and for how long."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import OpPolicy, autocast
from amp_core.dispatch import kept_operands, quantized_products

NAMES = ["fp8_tensorwise", "fp8_tiles", "mxfp6", "nvfp4"]
SCOPES = {"cached_casts": amp_core.cached_casts, "master_weights": amp_core.master_weights}


class Model(nn.Module):
    """A weight used by two ops, a bias, odd sizes, and a layer that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(20, 33), nn.Linear(33, 20, bias=False)
        self.free = nn.Parameter(torch.randn(20, 33))

    def body(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x))) @ self.free

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        x = checkpoint(self.body, x, use_reentrant=False) if again else self.body(x)
        return x @ self.up.weight


def policy_of(name: str) -> OpPolicy:
    return OpPolicy.default("cpu").override(dict.fromkeys(("linear", "matmul"), f"recipe {name}"))


def region(name: str) -> autocast:
    return autocast("cpu", dtype=torch.bfloat16, policy=policy_of(name))


def train(model: Model, name: str, around: Any, again: bool, batches: int = 3) -> list[Tensor]:
    """Return the outputs and gradients of two steps, each of several micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    results, generator = [], torch.Generator().manual_seed(1)
    torch.manual_seed(3)  # of stochastic rounding
    with around(model):
        for _ in range(2):
            for _ in range(batches):
                with region(name):
                    y = model(torch.randn(6, 20, generator=generator).requires_grad_(), again)
                    y.float().square().sum().backward()
                results.append(y.detach())
            results += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return results


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[int, ...]]]:
    """Count the calls that quantise, by the operand's shape."""
    counted: Counter[tuple[int, ...]] = Counter()
    quantize = quantized_products._quantize

    def count(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        counted[tuple(tensor.shape)] += 1
        return quantize(tensor, *args, **kwargs)

    monkeypatch.setattr(quantized_products, "_quantize", count)
    return counted


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
def test_once_per_step_and_dimension(scope: str, again: bool, calls: Counter[tuple[int, ...]]) -> None:
    """Each micro-batch, or each recomputation, quantises the weights again."""
    train(Model(), "mxfp8", SCOPES[scope], again)
    steps = 2
    # Each of three weights along both dimensions; the two uses of `up` share theirs.
    assert calls[20, 33] + calls[33, 20] == steps * 3 * 2
    calls.clear()
    train(Model(), "mxfp8", lambda _: nullcontext(), False)
    assert calls[20, 33] + calls[33, 20] == steps * 3 * 4 * 2


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_those_without_a_scope(name: str, scope: str) -> None:
    """A kept weight loses bits in storage, changes the order of a sum, or outlives an optimizer step."""
    wanted = train(Model(), name, lambda _: nullcontext(), True, 2)
    got = train(Model(), name, SCOPES[scope], True, 2)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def _write(model: Model) -> None:
    with torch.no_grad():
        model.up.weight.mul_(3)


def _swap(model: Model) -> None:
    model.up.weight.data = model.up.weight.detach() * 3


def _replace(model: Model) -> None:
    model.up.weight = nn.Parameter(model.up.weight.detach() * 3)


def _step(model: Model) -> None:
    model.up.weight.grad = -2 * model.up.weight.detach().clone()
    torch.optim.SGD([model.up.weight], lr=1.0, fused=True).step()


def _freeze(model: Model) -> None:
    _write(model)
    model.up.weight.requires_grad_(False)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("change", [_write, _swap, _replace, _step, _freeze])
def test_a_changed_weight_is_quantised_again(change: Any, scope: str) -> None:
    """A weight is multiplied as it was before it was written to, replaced or frozen."""
    model, x = Model(), torch.randn(4, 20)
    with SCOPES[scope](model) as handle, region("mxfp4"), torch.inference_mode():
        model(x)
    with SCOPES[scope](model) as handle:
        with region("mxfp4"):
            model(x)
        change(model)
        with region("mxfp4"):
            got = model(x)
        model.up.weight.data.mul_(2)
        handle.invalidate()
        with region("mxfp4"):
            later = model(x)
    with region("mxfp4"):
        assert torch.equal(later, model(x))
    model.up.weight.data.div_(2)
    with region("mxfp4"):
        assert torch.equal(got, model(x))


@pytest.mark.parametrize("scope", SCOPES)
def test_a_weight_that_is_rounded_at_random_is_drawn_at_each_use(scope: str) -> None:
    """All micro-batches of a step get one draw, whose error does not average out."""
    own = amp_core.Recipe.mxfp8()
    assert own.weight is not None
    own = replace(own, name="own", weight=replace(own.weight, rounding="stochastic"))
    policy, model, x = OpPolicy.default("cpu").override({"linear": own}), nn.Linear(32, 8), torch.ones(4, 32)
    draws = []
    for around in (SCOPES[scope], nullcontext):
        torch.manual_seed(0)
        with around(model), autocast("cpu", dtype=torch.bfloat16, policy=policy):
            draws.append([model(x) for _ in range(2)])
    assert not torch.equal(*draws[0])
    assert all(map(torch.equal, *draws))


@pytest.mark.parametrize("scope", SCOPES)
def test_kept_memory_is_counted_and_freed(scope: str) -> None:
    """What is kept takes more than the formats' bits, or stays when the scope has ended."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    elements = sum(p.numel() for p in model.parameters())
    for name, share in {"fp8_rowwise": 0.27, "mxfp8": 0.27, "mxfp4": 0.15, "nvfp4": 0.15}.items():
        handle = SCOPES[scope](model)
        with handle, region(name), torch.no_grad():
            model(torch.randn(3, 64))
            kept = handle.nbytes() - 2 * elements  # beside bfloat16
            assert 0 < kept <= share * 4 * elements
            forms = [form for cast in handle._cache.casts() for form in kept_operands.forms_of(cast).values()]
            stored = [weakref.ref(form.packed.values) for form in forms]
            assert len(stored) == 2
            del forms
        assert handle.nbytes() == 0
        assert [ref() for ref in stored] == [None, None]


@pytest.mark.slow
def test_graphs_keep_nothing() -> None:
    """A graph bakes in the weights of its first call."""
    weight, x = nn.Parameter(torch.randn(33, 20)), torch.randn(6, 20)
    model, policy = nn.ParameterList([weight]), policy_of("mxfp8")

    def run(x: Tensor) -> Tensor:
        with autocast("cpu", dtype=torch.bfloat16, policy=policy):
            return nn.functional.linear(x, model[0])

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with amp_core.cached_casts(model):
            assert torch.equal(run(x), compiled(x))
        assert torch.equal(run(x), compiled(x))
        with torch.no_grad():
            weight.mul_(3)
    torch._dynamo.reset()


def test_training_after_inference() -> None:
    """What inference has quantised cannot be used by a training step."""
    model, x = Model(), torch.randn(4, 20)
    with amp_core.cached_casts(model) as handle, region("mxfp8"):
        with torch.inference_mode():
            first = model(x)
        second = model(x)
        second.float().sum().backward()
        assert handle.nbytes() > 0
    assert torch.equal(first, second.detach())
