"""The step of an optimizer that unscales and skips on the device itself, as torch's fused ones do."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from amp_core._torch.steps import is_fused
from amp_core.common.optimizers import is_torchs, take_step
from amp_core.scaling.arithmetic import is_tracing, moved

PASSES_ITSELF = (
    "GradScaler is going to stop passing itself as a keyword argument to the passed "
    "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
    "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly."
)
"""torch's warning."""


def is_traceable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `torch.compile` can take a step of `optimizer` into a graph.

    It must decide on the device. torch's own optimizers break the graph
    (``torch.optim.optimizer._use_grad``), and Dynamo cannot continue after a break this deep.
    """
    return not is_torchs(optimizer) and is_fused(optimizer)


def step_on_device(
    optimizer: torch.optim.Optimizer,
    divisor: Tensor | None,
    found_inf: Tensor,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Give `optimizer` divisor and flag, and let it step. Nothing waits for the device.

    Args:
        optimizer: steps, or skips where `found_inf` is set.
        divisor: the gradients are to be divided by it; None if they are unscaled already.
        found_inf: 0-dim; 1.0 if a gradient is not finite, else 0.0.
        args: passed on to ``optimizer.step``.
        kwargs: passed on to ``optimizer.step``.
    """
    preset = getattr(optimizer, "grad_scale", None)
    if divisor is not None and preset is not None:
        divisor = divisor * preset
    values = {"grad_scale": preset if divisor is None else divisor, "found_inf": found_inf}
    # Set for this step alone: a retry after an error must not find them.
    before = {name: getattr(optimizer, name) for name in values if hasattr(optimizer, name)}
    first = _groups_without_momentum(optimizer)
    try:
        _set(optimizer, values)
        result = take_step(optimizer, args, kwargs)
        before = {}  # torch, too, consumes a preset grad_scale
        _remove(optimizer, values)
    except BaseException:
        _remove(optimizer, values)
        _set(optimizer, before)
        raise
    _clear_momentum(optimizer, first, found_inf)
    return result


def takes_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step`` has a parameter ``grad_scaler``, torch's deprecated protocol."""
    method = None if is_tracing() else getattr(optimizer.step, "__func__", None)
    known = None if method is None else _takes_scaler.get(method)
    if known is None:
        known = "grad_scaler" in inspect.signature(optimizer.step).parameters
        if method is not None:
            _takes_scaler[method] = known
    return known


def refuse_beyond_scaler(optimizer: torch.optim.Optimizer, max_norm: float | None, key: str | None) -> None:
    """Raise ValueError for what an optimizer that takes ``grad_scaler`` would not do."""
    name = "key" if max_norm is None else "max_norm"
    if max_norm is not None or key is not None:
        raise ValueError(_BEYOND_SCALER.format(name=name, optimizer=type(optimizer).__name__))


_BEYOND_SCALER = (
    "step({name}=...) has no effect on this {optimizer}: its step takes grad_scaler and unscales by itself, "
    "by the scale of losses without a key. Clip with clip_grad_norm_() before, if its step accepts unscaled "
    "gradients, and scale its losses without a key."
)

_takes_scaler: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Cached: reading a signature takes as long as reading a few small gradients."""


def _set(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
    for name, value in values.items():  # a wrapper may pass them on to what it wraps
        setattr(optimizer, name, value)


def _remove(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
    for name in names:
        if hasattr(optimizer, name):
            delattr(optimizer, name)


# Workaround for torch's fused SGD, which leaves momentum uninitialised if its first step is skipped:
# ``torch.optim.sgd._fused_sgd`` allocates the buffers with ``empty_like`` for the kernel to fill, but the
# kernel returns at once if ``found_inf`` is set (torch 2.13.0). The next step adds whatever is in that
# memory.


def _groups_without_momentum(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups whose momentum the next step will allocate."""
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    return [group for group in optimizer.param_groups if group["momentum"] and _is_first(optimizer, group)]


def _is_first(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    states = (optimizer.state.get(p, {}) for p in group["params"] if p.grad is not None)
    first = next(states, None)  # torch allocates all buffers of a group at once
    return first is not None and first.get("momentum_buffer") is None


@torch.no_grad()
def _clear_momentum(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], found_inf: Tensor
) -> None:
    """Reset the momentum of `groups` to its initial state if the step was skipped.

    Without dampening that state is zero. With dampening the buffers must go, and the host waits to know.
    """
    for group in groups:
        states = [optimizer.state[p] for p in group["params"] if p.grad is not None]
        if not group["dampening"]:
            for state in states:
                buffer = state["momentum_buffer"]
                buffer.masked_fill_(moved(found_inf, buffer.device) > 0, 0)
        elif found_inf.item():
            for state in states:
                state["momentum_buffer"] = None
