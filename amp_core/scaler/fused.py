"""Steps of optimizers that unscale and decide on the device themselves (torch's fused ones)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from amp_core.scaler.arithmetic import clip_coefficient, combine, reciprocal
from amp_core.scaler.gradients import by_device, gather, total_norm
from amp_core.state import OptState

if TYPE_CHECKING:
    from amp_core.grad_scaler import GradScaler

_PASSES_ITSELF = (
    "GradScaler is going to stop passing itself as a keyword argument to the passed "
    "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
    "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly."
)
_ABSENT = object()


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
    if "grad_scaler" in inspect.signature(optimizer.step).parameters:
        warnings.warn(_PASSES_ITSELF, FutureWarning, stacklevel=3)
        return cast("float | None", optimizer.step(*args, **{**kwargs, "grad_scaler": scaler}))
    divisor = _read(optimizer, state, scale, max_norm, norm_type)
    scaler._record(optimizer, state)
    preset = getattr(optimizer, "grad_scale", None)
    if divisor is not None and preset is not None:
        divisor = divisor * preset
    found_inf = combine(list(state["found_inf_per_device"].values()), scale.device)
    with _attributes(optimizer, grad_scale=preset if divisor is None else divisor, found_inf=found_inf):
        return cast("float | None", optimizer.step(*args, **kwargs))


def _read(
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
    measured = [part.measure(norm_type) for part in parts]
    before = list(state["found_inf_per_device"].items())
    state["found_inf_per_device"] = by_device(
        before + [(p.device, m.found_inf) for p, m in zip(parts, measured, strict=True)]
    )
    divisor = torch.ones_like(scale) if unscaled else scale
    if max_norm is None:
        return divisor
    norm = total_norm(measured, norm_type, scale.device) * reciprocal(divisor)
    state["norm"] = norm
    return (divisor / clip_coefficient(norm, max_norm)).float()


@contextmanager
def _attributes(optimizer: torch.optim.Optimizer, **values: Any) -> Iterator[None]:
    """Set attributes for the step alone: a step that raises must not find them at its retry."""
    before = {name: optimizer.__dict__.get(name, _ABSENT) for name in values}
    optimizer.__dict__.update(values)
    try:
        yield
    except BaseException:
        for name, value in before.items():
            if value is not _ABSENT:
                optimizer.__dict__[name] = value
            else:
                optimizer.__dict__.pop(name, None)
        raise
    for name in values:  # torch consumes a preset grad_scale
        optimizer.__dict__.pop(name, None)
