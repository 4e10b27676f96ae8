"""Steps of optimizers that unscale and decide on the device themselves (torch's fused ones)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from amp_core.scaling.arithmetic import combine, is_tracing, overflows, unscale_and_clip
from amp_core.scaling.gradients import by_device, gather, look
from amp_core.scaling.workarounds import clear_momentum, groups_without_momentum
from amp_core.states.loss_scale import OptState

if TYPE_CHECKING:
    from amp_core.scaling.grad_scaler import GradScaler

_PASSES_ITSELF = (
    "GradScaler is going to stop passing itself as a keyword argument to the passed "
    "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
    "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly."
)


def is_traceable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `torch.compile` can take a step of `optimizer` into a graph.

    It must decide on the device. torch's own break the graph (``torch.optim.optimizer._use_grad``), and
    Dynamo fails to go on after a break so far inside.
    """
    own = type(optimizer).__module__.startswith("torch.optim")
    return not own and getattr(optimizer, "_step_supports_amp_scaling", False)


def step_fused(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    scale: Tensor,
    max_norm: float | None,
    norm_type: float,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> float | None:
    """Hand `optimizer` the factor and the flag, and let it step; nothing waits for the device."""
    if _wants_scaler(optimizer):
        warnings.warn(_PASSES_ITSELF, FutureWarning, stacklevel=4)
        return cast("float | None", optimizer.step(*args, **{**kwargs, "grad_scaler": scaler}))
    divisor = _read(scaler, optimizer, state, scale, max_norm, norm_type)
    if not is_tracing():  # a history that grows would have every step compiled anew
        scaler._describe(scaler._record(optimizer, state), optimizer, state.pop("looked", None))
    preset = getattr(optimizer, "grad_scale", None)
    if divisor is not None and preset is not None:
        divisor = divisor * preset
    found_inf = combine(list(state["found_inf_per_device"].values()), scale.device)
    values = {"grad_scale": preset if divisor is None else divisor, "found_inf": found_inf}
    # Set for the step alone: a step that raises must not find them at its retry.
    before = {name: optimizer.__dict__[name] for name in values if name in optimizer.__dict__}
    optimizer.__dict__.update(values)
    first = groups_without_momentum(optimizer)
    try:
        result = optimizer.step(*args, **kwargs)
    except BaseException:
        _forget(optimizer, values)
        optimizer.__dict__.update(before)
        raise
    _forget(optimizer, values)  # torch consumes a preset grad_scale
    clear_momentum(optimizer, first, found_inf)
    return cast("float | None", result)


def _read(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    scale: Tensor,
    max_norm: float | None,
    norm_type: float,
) -> Tensor | None:
    """Read the gradients once if nobody has; return what they are still to be divided by."""
    unscaled = state["stage"] is OptState.UNSCALED
    if unscaled and max_norm is None:
        return None
    parts = gather(optimizer, allow_fp16=True)
    seen = look(parts, norm_type, scale.device, scaler._process_group, scaler._overlap)
    state["looked"] = parts, seen.measured
    flags = [*state["found_inf_per_device"].items(), *seen.flags.items()]
    beyond = overflows(seen.norm, scale) if parts and not unscaled else None
    if beyond is not None:
        flags.append((scale.device, beyond))
    state["found_inf_per_device"] = by_device(flags)
    divisor = torch.ones_like(scale) if unscaled else scale
    if max_norm is None:
        return divisor
    state["norm"], divisor = unscale_and_clip(seen.norm, divisor, max_norm, as_divisor=True)
    return divisor


def _wants_scaler(optimizer: torch.optim.Optimizer) -> bool:
    method = None if is_tracing() else getattr(optimizer.step, "__func__", None)
    known = None if method is None else _takes_scaler.get(method)
    if known is None:
        known = "grad_scaler" in inspect.signature(optimizer.step).parameters
        if method is not None:
            _takes_scaler[method] = known
    return known


_takes_scaler: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Whether a function ``step`` does; to read its signature takes as long as to read some small gradients."""


def _forget(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
    for name in names:
        optimizer.__dict__.pop(name, None)
