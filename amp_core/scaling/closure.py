"""Steps of optimizers that evaluate the loss themselves, through a closure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from amp_core.scaling.arithmetic import combine
from amp_core.scaling.unscale import Unscaling
from amp_core.states.loss_scale import OptState, next_stage

if TYPE_CHECKING:
    from amp_core.scaling.grad_scaler import GradScaler

Closure = Callable[[], Any]


class _OverflowedError(Exception):
    """An evaluation left gradients that are not finite."""


class ClosureSteps(Unscaling):
    """The part of `GradScaler` that has to do with closures."""

    def step_closure(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Closure,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        key: str | None = None,
    ) -> Any:
        """Take a step of an optimizer that calls `closure`, once or more (LBFGS, SAM), on true gradients.

        The gradients that each evaluation leaves are unscaled, clipped if asked for, and checked, which
        waits for the device. Where one is not finite, the step is skipped whole: parameters and the
        optimizer's state are put back as they were before it, of which a copy is kept during the step.

        Args:
            optimizer: ``optimizer.step(closure)`` is called. Where it begins with gradients that are there
                already (SAM), call `unscale_` before.
            closure: clears the gradients, computes the loss, calls ``scaler.scale(loss).backward()``, and
                returns the loss itself, not scaled.
            max_norm: clip the gradients of each evaluation to this norm.
            norm_type: the order of that norm.
            key: of the loss, if it is scaled under one.

        Returns:
            What ``optimizer.step`` returns; ``None`` when the step is skipped.

        Raises:
            RuntimeError: a step was taken since the last `update`; torch's text.
            AssertionError: the closure scaled nothing, or left no gradient.
        """
        own = cast("GradScaler", self)
        if not self._enabled:
            return optimizer.step(_clipped(own, optimizer, closure, max_norm, norm_type))
        owner = own if key is None else self._making_key(key)
        owner._updates = self._updates
        return owner._step_closure(optimizer, closure, max_norm, norm_type)

    def _step_closure(
        self, optimizer: torch.optim.Optimizer, closure: Closure, max_norm: float | None, norm_type: float
    ) -> Any:
        own = cast("GradScaler", self)
        state = self._per_optimizer_states.of(optimizer)
        stage = next_stage(state["stage"], "step")

        def evaluate() -> Any:
            state["stage"], state["found_inf_per_device"] = OptState.READY, {}
            with torch.enable_grad():
                loss = closure()
            if max_norm is None:
                own.unscale_(optimizer)
            else:
                own.clip_grad_norm_(optimizer, max_norm, norm_type)
            self._check(optimizer, state)
            return loss

        before, result = _Snapshot(optimizer), None
        try:
            if state["stage"] is OptState.UNSCALED:
                self._check(optimizer, state)
            result = optimizer.step(evaluate)
        except _OverflowedError:
            bad = self._bad_parameters(optimizer)
            before.put_back()
            own._record(optimizer, state)._bad = bad
        except BaseException:
            before.put_back()
            state["stage"], state["found_inf_per_device"] = OptState.READY, {}
            raise
        else:
            own._record(optimizer, state)
        state["stage"] = stage
        return result

    def _check(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        found = list(state["found_inf_per_device"].values())
        if not found:
            raise AssertionError(
                f"No inf checks were recorded for this optimizer. The closure given to this "
                f"{type(optimizer).__name__} left no gradient: it must call scaler.scale(loss).backward()."
            )
        if combine(found, found[0].device).item():
            raise _OverflowedError


class _Snapshot:
    """The parameters and the state of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._params: list[tuple[Tensor, Tensor]] = [(p, p.detach().clone()) for p in held]
        self._state = {p: copy.deepcopy(state) for p, state in optimizer.state.items()}

    @torch.no_grad()
    def put_back(self) -> None:
        for param, value in self._params:
            param.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def _clipped(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    closure: Closure,
    max_norm: float | None,
    norm_type: float,
) -> Closure:
    def evaluate() -> Any:
        with torch.enable_grad():
            loss = closure()
        if max_norm is not None:
            scaler.clip_grad_norm_(optimizer, max_norm, norm_type)
        return loss

    return evaluate
