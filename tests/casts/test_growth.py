"""What scopes and stored weights cost beside many models and optimizers: counted, not timed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from amp_core import autocast, cached_casts, count_lost_updates, master_weights

from ..counted import calls_of

X = torch.ones(2, 4)


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])


def assert_linear(prepared: Callable[[int], Callable[[], Any]]) -> None:
    """Four times as many of something take about four times as many calls."""
    few, many = (calls_of(prepared(count)) for count in (40, 160))
    assert many < 5 * few, (few, many)


@pytest.mark.parametrize("scope", [cached_casts, master_weights])
def test_the_first_region_in_a_scope(scope: Any) -> None:
    """The first cast of each weight looks at all that were cast before: minutes for a large model."""

    def prepared(count: int) -> Callable[[], Any]:
        model = layers(count)

        def run() -> None:
            with scope(model), autocast("cpu"):
                model(X)

        return run

    assert_linear(prepared)


@pytest.mark.parametrize("scope", [functools.partial(cached_casts, persistent=True), master_weights])
def test_an_optimizer_per_layer_in_a_scope(scope: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of each optimizer looks at all weights of a model that the scope leaves to torch."""
    monkeypatch.undo()  # these are small

    def prepared(count: int) -> Callable[[], Any]:
        model = layers(count)
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
        handle = scope(model)

        def train() -> None:
            with autocast("cpu"):
                loss = model(X).float().sum()
            loss.backward()
            for each in optimizers:
                each.step()

        def run() -> None:
            train()
            handle.remove()

        for _ in range(3):
            train()
        return run

    assert_linear(prepared)


def test_another_model_beside_a_scope() -> None:
    """Each weight of a second model looks through all weights of the one that has a scope."""

    def prepared(count: int) -> Callable[[], Any]:
        model, other = layers(count), layers(count)

        def run() -> None:
            with cached_casts(model), torch.no_grad(), autocast("cpu"):
                model(X)
                other(X)

        return run

    assert_linear(prepared)


def test_weights_that_replace_others_unseen_are_found_beside_another_model() -> None:
    """A scope stops looking for new weights of its model once it has met those of another one."""
    model, other = layers(40), layers(40)
    with cached_casts(model) as scope, torch.no_grad(), autocast("cpu"):
        model(X)
        before = scope.nbytes()
        other(X)
        for layer in model:
            layer._parameters["weight"] = nn.Parameter(torch.randn(4, 4))  # torch's hooks do not run
        results = [model(X) for _ in range(2)]
        assert scope.nbytes() == before
    with torch.no_grad(), autocast("cpu"):
        expected = model(X)
    assert all(torch.equal(each, expected) for each in results)


def one_optimizer_per_layer(**options: Any) -> Callable[[int], Callable[[], Any]]:
    def prepared(count: int) -> Callable[[], Any]:
        model = layers(count)
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
        handles = [master_weights(model, each, "remainder", **options) for each in optimizers]
        model(X.bfloat16()).float().sum().backward()

        def run() -> list[Any]:
            for _ in range(2):
                for each in optimizers:
                    each.step()
            return handles

        return run

    return prepared


def test_many_optimizers_of_stored_weights() -> None:
    """Each step looks through what all other optimizers have written."""
    assert_linear(one_optimizer_per_layer())


def test_fused_optimizers_beside_stored_weights() -> None:
    """Each step of an optimizer that is not stored for looks through all that are."""

    def prepared(count: int) -> Callable[[], Any]:
        stored, model = one_optimizer_per_layer()(count), layers(count)
        stored()
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1, fused=True) for layer in model]
        model(X).sum().backward()
        return lambda: [stored, [each.step() for each in optimizers]]

    assert_linear(prepared)


def test_lost_updates_of_many_optimizers_of_stored_weights() -> None:
    """The step of each optimizer whose lost updates are counted looks up the names of all weights."""
    assert_linear(one_optimizer_per_layer(lost_updates=True))


def test_lost_updates_of_many_optimizers() -> None:
    """The step of each optimizer whose lost updates are counted looks up the names of all weights."""

    def prepared(count: int) -> Callable[[], Any]:
        model = layers(count).bfloat16()
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
        handles = [count_lost_updates(model, each) for each in optimizers]
        model(X.bfloat16()).float().sum().backward()
        for each in optimizers:
            each.step()
        return lambda: [handles, [each.step() for each in optimizers]]

    assert_linear(prepared)


@pytest.mark.parametrize("storage", [None, "remainder"])
def test_lost_updates_have_the_names_of_the_moment(storage: Any) -> None:
    """A layer that was moved, or put in the place of another, is counted under its old name."""
    model = layers(3).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    counts = (
        master_weights(model, optimizer, storage, lost_updates=True)
        if storage
        else count_lost_updates(model, optimizer)
    )

    def names() -> set[str]:
        optimizer.zero_grad()
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        return {name.partition(".")[0] for name in counts.lost_updates()}

    assert names() == {"0", "1", "2"}
    first, model[1] = model[1], nn.Identity()
    assert names() == {"0", "2"}
    model.append(first)
    assert names() == {"0", "2", "3"}
    del model[0]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).bfloat16())]})
    model[0].joined = optimizer.param_groups[1]["params"][0]
    assert names() == {"0", "1", "2"}
    assert "0.joined" in counts.lost_updates()
