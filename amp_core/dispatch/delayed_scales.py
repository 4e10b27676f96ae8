"""Find the histories of a weight's products, which a scope such as `delayed_scales` keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from amp_core._torch.tensors import base_of
from amp_core._torch.tracing import calls_are_captured, is_fake, uncompared
from amp_core.common.locks import new_lock
from amp_core.dispatch.sources import history_sources
from amp_core.errors import PolicyError
from amp_core.formats import AmaxHistory, Delayed, Quantization, Quantized, Recipe, quantize
from amp_core.policy.recipes import ROLES


class GraphHistory(NamedTuple):
    """What stands for a history in a graph, which finds it by the weight whenever it runs.

    Attributes:
        weight: the second factor of the op, before it was cast.
        role: the operand.
    """

    weight: Tensor
    role: str

    def quantize(self, tensor: Tensor, how: Quantization, dim: int, seed: int | Tensor | None) -> Quantized:
        """Quantise with PyTorch operations and the history's scale, and record the largest magnitude."""
        delayed = how.found
        assert isinstance(delayed, Delayed)
        # What both calls compute is in the graph once; the rounding of this one is not.
        own = quantize(tensor, replace(how, found="current"), dim, seed=seed).amax
        with torch.no_grad():  # of the weight itself: a detached one is another tensor
            amax = _exchange(self.weight, own, self.role, delayed.history, delayed.margin, delayed.algorithm)
        return quantize(tensor, how, dim, seed=seed, amax=amax)


@torch.library.custom_op("amp_core::delayed_amax", mutates_args=())
def _exchange(weight: Tensor, amax: Tensor, role: str, history: int, margin: int, algorithm: str) -> Tensor:
    """Record `amax` and return that of earlier steps.

    It may be left out, repeated and moved within a step like an op without effect: a second record of a
    magnitude changes nothing, and what is returned changes with the step alone.
    """
    found = _require(weight, role, Delayed(history, margin, cast("Any", algorithm)))
    before = found.amax
    record(found, amax)
    return before


def record(history: AmaxHistory, amax: Tensor) -> None:
    """Note a magnitude in `history`. Several threads may run products of one weight."""
    with _recording, uncompared():
        history.record(amax)


_recording = new_lock()


@_exchange.register_fake
def _(
    weight: Tensor,  # noqa: ARG001
    amax: Tensor,
    role: str,  # noqa: ARG001
    history: int,  # noqa: ARG001
    margin: int,  # noqa: ARG001
    algorithm: str,  # noqa: ARG001
) -> Tensor:
    return amax.new_empty((), dtype=torch.float32)


def histories(recipe: Recipe, factor: Tensor) -> dict[str, AmaxHistory | GraphHistory]:
    """Return, by role, the histories of the delayed scales for one call of an op with `recipe`.

    Args:
        recipe: the recipe.
        factor: the second factor of the op before it was cast: a weight, or a view of one.

    Raises:
        PolicyError: no scope keeps them. A graph raises it when it runs.
    """
    found = {role: how.found for role in ROLES if (how := getattr(recipe, role)) is not None}
    delayed = {role: each for role, each in found.items() if isinstance(each, Delayed)}
    if not delayed:
        return {}
    weight = base_of(factor)
    if calls_are_captured() or is_fake(weight):
        return {role: GraphHistory(weight, role) for role in delayed}
    return {role: _require(weight, role, each) for role, each in delayed.items()}


def _require(weight: Tensor, role: str, delayed: Delayed) -> AmaxHistory:
    history = _history(weight, role, delayed)
    if history is None:
        for source in history_sources.active:
            source.look_again()
        history = _history(weight, role, delayed)
    if history is None:
        raise PolicyError(_NOTHING_KEEPS)
    return history


def _history(weight: Tensor, role: str, delayed: Delayed) -> AmaxHistory | None:
    found = (source.history(weight, role, delayed) for source in history_sources.active)
    return next((history for history in found if history is not None), None)


_NOTHING_KEEPS = (
    "A recipe with delayed scales is in force, and nothing keeps the histories of this product: its second "
    "factor is not a parameter of a model in amp_core.delayed_scales(model). Enter that scope, or give the "
    "op another rule, such as a recipe with found='current'. FullyShardedDataParallel hides the parameters "
    "while a module runs: shard with torch.distributed.fsdp.fully_shard instead."
)
