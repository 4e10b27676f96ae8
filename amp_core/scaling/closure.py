"""Helpers for optimizers that evaluate the loss themselves, through a closure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_core.common.arguments import check_optimizer
from amp_core.common.optimizers import copied_group, inner_optimizers, parameters_of, take_step
from amp_core.scaling.arithmetic import combine
from amp_core.scaling.grad_passes import Flags
from amp_core.scaling.optimizer_state import OptimizerState
from amp_core.scaling.step_log import StepLog
from amp_core.scaling.step_record import BadParameter
from amp_core.states.loss_scale import OptState

Closure = Callable[[], Any]


class OverflowedError(Exception):
    """An evaluation produced gradients that are not finite."""


class Snapshot:
    """A copy of the parameters and the state of an optimizer, and of those that it steps itself."""

    @torch.inference_mode(False)  # otherwise the optimizer could not write to the copies afterwards
    @torch.no_grad()
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._params: list[tuple[Tensor, Tensor]] = [
            (p, p.detach().clone()) for p in parameters_of(optimizer)
        ]
        optimizers = (optimizer, *inner_optimizers(optimizer))
        self._states = [
            (state, {key: copy.deepcopy(value) for key, value in state.items()})
            for each in optimizers
            for state in (each.state, getattr(each, "_amp_core_first", {}))  # see `StoredWeights`
        ]
        self._groups = [
            (group, dict(group), copied_group(group)) for each in optimizers for group in each.param_groups
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copy back."""
        for param, value in self._params:
            param.copy_(value)
        for state, before in self._states:
            state.clear()
            state.update(before)
        for group, held, options in self._groups:
            group.clear()  # also of options that the step added
            group.update({name: _restored(held[name], value) for name, value in options.items()})


def _restored(held: Any, value: Any) -> Any:
    """Return an option with its former value; a tensor stays the same one, which the program may hold."""
    if isinstance(held, Tensor):
        return held.copy_(value)
    if type(held) is tuple:
        return tuple(map(_restored, held, value))
    return value


def check_closure(optimizer: object, closure: object) -> None:
    """Raise TypeError unless the arguments of `GradScaler.step_closure` have the right kind."""
    check_optimizer(optimizer, "step_closure")
    if not callable(closure):
        raise TypeError(f"closure must be a function that returns the loss, not {closure!r}.")


def evaluate(closure: Closure) -> Any:
    """Call `closure` with gradients enabled: optimizers step without."""
    with torch.enable_grad():
        return closure()


def step_whole(
    optimizer: torch.optim.Optimizer, closure: Closure, state: OptimizerState, log: StepLog
) -> tuple[Any, tuple[BadParameter, ...] | None]:
    """Step, or restore `optimizer` if an evaluation overflows, or with any error.

    Args:
        optimizer: steps.
        closure: leaves unscaled gradients, and notes in `state` what it found.
        state: that of `optimizer`.
        log: names parameters.

    Returns:
        The result of the step, and None; or None, and the parameters that were bad in the first evaluation
        that overflowed.

    Raises:
        AssertionError: the closure left no gradient, or was not called.
    """
    before, known = Snapshot(optimizer), state.found_inf_per_device
    overflows: list[tuple[Flags, Tensor | None, tuple[BadParameter, ...]]] = []

    def check() -> None:
        if _has_overflowed(optimizer, state):
            bad = log.bad_parameters(optimizer)
            overflows.append((state.found_inf_per_device, state.total_norm, bad))
            raise OverflowedError

    def checked() -> Any:
        state.restart()
        loss = closure()
        check()
        return loss

    try:
        if state.stage is OptState.UNSCALED:
            check()
        result = take_step(optimizer, (checked,), {})
        if state.stage is OptState.READY and not overflows:
            raise AssertionError(_NOT_EVALUATED.format(optimizer=type(optimizer).__name__))
    except OverflowedError:
        pass
    except BaseException:
        before.restore()
        if state.found_inf_per_device is not known:  # the closure was called
            state.restart()
        raise
    if not overflows:  # the optimizer may have caught the error and gone on
        return result, None
    before.restore()
    state.found_inf_per_device, state.total_norm, bad = overflows[0]
    return None, bad


def _has_overflowed(optimizer: torch.optim.Optimizer, state: OptimizerState) -> bool:
    """Look at the flags of the last evaluation; waits for the device.

    Raises:
        AssertionError: the closure left no gradient.
    """
    flags = state.flags()
    if not flags:
        raise AssertionError(
            f"No inf checks were recorded for this optimizer. The closure given to this "
            f"{type(optimizer).__name__} left no gradient: it must call scaler.scale(loss).backward()."
        )
    return bool(combine(flags, flags[0].device).item())


_NOT_EVALUATED = (
    "This {optimizer} has stepped on gradients that were not unscaled: it did not call its closure, or "
    "caught the error of the last call. Its parameters and state are as before. If it starts from gradients "
    "that exist already, call unscale_(optimizer) before step_closure."
)
