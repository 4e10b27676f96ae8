"""Helpers for optimizers that evaluate the loss themselves, through a closure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_core.common.arguments import check_optimizer
from amp_core.common.optimizers import copied_group, inner_optimizers, parameters_of
from amp_core.scaling.arithmetic import combine
from amp_core.scaling.optimizer_state import OptimizerState

Closure = Callable[[], Any]


class OverflowedError(Exception):
    """An evaluation produced gradients that are not finite."""


class Snapshot:
    """A copy of the parameters and the state of an optimizer, and of those that it steps itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._params: list[tuple[Tensor, Tensor]] = [
            (p, p.detach().clone()) for p in parameters_of(optimizer)
        ]
        self._states = [
            (state, {key: copy.deepcopy(value) for key, value in state.items()})
            for each in (optimizer, *inner_optimizers(optimizer))
            for state in (each.state, getattr(each, "_amp_core_first", {}))  # see `StoredWeights`
        ]
        self._groups = [(group, copied_group(group)) for group in optimizer.param_groups]

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copy back."""
        for param, value in self._params:
            param.copy_(value)
        for state, before in self._states:
            state.clear()
            state.update(before)
        for group, options in self._groups:
            group.update(options)


def check_closure(optimizer: object, closure: object) -> None:
    """Raise TypeError unless the arguments of `GradScaler.step_closure` have the right kind."""
    check_optimizer(optimizer, "step_closure")
    if not callable(closure):
        raise TypeError(f"closure must be a function that returns the loss, not {closure!r}.")


def evaluate(closure: Closure) -> Any:
    """Call `closure` with gradients enabled: optimizers step without."""
    with torch.enable_grad():
        return closure()


def raise_if_overflowed(optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Look at the flags of the last evaluation; waits for the device.

    Raises:
        OverflowedError: a gradient is not finite.
        AssertionError: the closure left no gradient.
    """
    flags = state.flags()
    if not flags:
        raise AssertionError(
            f"No inf checks were recorded for this optimizer. The closure given to this "
            f"{type(optimizer).__name__} left no gradient: it must call scaler.scale(loss).backward()."
        )
    if combine(flags, flags[0].device).item():
        raise OverflowedError
