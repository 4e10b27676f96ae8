"""Find the histories of a weight's products, which a scope such as `delayed_scales` keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from amp_core._torch import internals as _torch
from amp_core.dispatch.sources import Sources
from amp_core.errors import PolicyError
from amp_core.formats import AmaxHistory, Delayed, Quantization, Recipe
from amp_core.policy.recipes import ROLES


class HistorySource(Protocol):
    """A scope that keeps histories."""

    def history(self, weight: Tensor, role: str, delayed: Delayed) -> AmaxHistory | None:
        """Return the history of one role of the products of `weight`; None if the scope does not cover it."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """End a step of the histories whose weights `optimizer` has."""


sources = Sources[HistorySource]()


class _Thread(threading.local):
    weight: Tensor | None = None
    """The second factor of the op that runs, before it was cast."""


_thread = _Thread()


def is_delayed(recipe: Recipe) -> bool:
    """Return whether a role of `recipe` has a delayed scale."""
    return any(_delayed(getattr(recipe, role)) is not None for role in ROLES)


def _delayed(how: Quantization | None) -> Delayed | None:
    return how.found if how is not None and isinstance(how.found, Delayed) else None


def remembering(run: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Return a runner like `run` that knows the weight at `position` of its arguments before it is cast."""

    def remember(keyset: Any, args: Any, kwargs: Any) -> Any:
        weight = args[position]
        before, _thread.weight = _thread.weight, _torch.base_of(weight)
        try:
            return run(keyset, args, kwargs)
        finally:
            _thread.weight = before

    return remember


def histories(recipe: Recipe) -> dict[str, AmaxHistory]:
    """Return, by role, the histories for the products of the op that runs in this thread.

    Raises:
        PolicyError: no scope keeps them, or the op is captured by a graph.
    """
    if not is_delayed(recipe):
        return {}
    if _torch.calls_are_captured():
        raise PolicyError(f"{_name(recipe)} has delayed scales, which a graph cannot keep. {_INSTEAD}")
    weight, found = _thread.weight, dict[str, AmaxHistory]()
    for role in ROLES:
        delayed = _delayed(getattr(recipe, role))
        if delayed is None:
            continue
        history = None if weight is None else _history(weight, role, delayed)
        if history is None:
            raise PolicyError(
                f"{_name(recipe)} has delayed scales, and nothing keeps the histories of this product: its "
                f"second factor is not a parameter of a model in amp_core.delayed_scales(model). {_INSTEAD}"
            )
        found[role] = history
    return found


def _history(weight: Tensor, role: str, delayed: Delayed) -> AmaxHistory | None:
    found = (source.history(weight, role, delayed) for source in sources.active)
    return next((history for history in found if history is not None), None)


def _name(recipe: Recipe) -> str:
    return f"The recipe {recipe.name!r}"


_INSTEAD = "Enter that scope, or give the op another rule, such as a recipe with found='current'."
