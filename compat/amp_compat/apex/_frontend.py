"""`initialize`, `scale_loss` and their shared state."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import amp_core
from amp_compat.apex import _models
from amp_compat.apex._levels import LossScale, Properties, properties
from amp_core.common.text import counted
from amp_core.scaling.gradients import group_by_device
from amp_core.states.loss_scale import LossScaleSchedule, ScaleState, next_scale

master_params = _models.master_params

_Gradients = list[tuple[nn.Parameter, Tensor | None]]


@dataclass
class _Scaler:
    """One loss scale."""

    state: ScaleState
    schedule: LossScaleSchedule
    dynamic: bool


@dataclass
class _State:
    """The state set up by `initialize`; one per process, as in apex."""

    chosen: Properties | None = None
    device_type: str = "cpu"
    scalers: list[_Scaler] = field(default_factory=list)
    region: ExitStack = field(default_factory=ExitStack)


_state = _State()


def initialize(  # apex's signature
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,  # noqa: ARG001  # apex prints its settings
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Set up models and optimizers for mixed precision in place, and return them as they were passed.

    Args:
        models: a module or a list of them, already on their device, not yet wrapped for distributed training.
        optimizers: an optimizer or a list of them; if None, only the models are returned.
        enabled: ``False`` makes this and every other function here do nothing.
        opt_level: ``"O0"`` to ``"O3"``; the next five arguments override its settings.
        cast_model_type: see `amp_compat.apex._levels.Properties`, also for the next four.
        patch_torch_functions: run ops in mixed precision.
        keep_batchnorm_fp32: leave batch norms in float32.
        master_weights: let the optimizers update float32 copies.
        loss_scale: a number or ``"dynamic"``: starts at 2**16, halves on overflow, doubles after 2000 steps.
        cast_model_outputs: the dtype for the models' outputs (O2: float32).
        num_losses: the number of losses with a separate scale; see `scale_loss`.
        verbosity: ignored; nothing is printed.
        min_loss_scale: lower bound of a dynamic scale.
        max_loss_scale: upper bound of a dynamic scale.

    Raises:
        RuntimeError: the level is unknown or contradicts the other arguments, or a model's weights are not
            float32.
    """
    global _state  # noqa: PLW0603  # one per process
    if not enabled:
        _reset()
        return models if optimizers is None else (models, optimizers)
    chosen = properties(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    model_list, optimizer_list = _as_list(models), _as_list(optimizers)
    _check_float32(model_list)
    _reset()
    scalers = [_new_scaler(chosen.loss_scale, min_loss_scale, max_loss_scale) for _ in range(num_losses)]
    _state = _State(chosen, _device_type(model_list), scalers)
    _set_up(model_list, optimizer_list, chosen, cast_model_outputs)
    return models if optimizers is None else (models, optimizers)


def _set_up(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    chosen: Properties,
    outputs: torch.dtype | None,
) -> None:
    if chosen.cast_model_type is not None:
        lowered = chosen.cast_model_type is not torch.float32
        for model in models:
            _models.cast_model(model, chosen, outputs or (torch.float32 if lowered else None))
    for optimizer in optimizers:
        if chosen.master_weights:
            _models.add_master_weights(optimizer)
        optimizer.register_step_post_hook(lambda *_: torch.clear_autocast_cache())
    if chosen.master_weights:
        for model in models:
            _models.load_into_masters(model, optimizers)
    if chosen.patch_torch_functions:
        _state.region.enter_context(amp_core.autocast(_state.device_type, torch.float16))


@contextmanager
def scale_loss(  # apex's signature
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: nn.Module | None = None,  # noqa: ARG001  # reserved by apex
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,  # noqa: ARG001  # apex never used it
) -> Iterator[Tensor]:
    """Yield the scaled `loss`; on exit, unscale the gradients and skip the next step on overflow.

    Args:
        loss: the loss; yielded in float32.
        optimizers: the optimizer or optimizers whose parameters get gradients.
        loss_id: which of the ``num_losses`` scales to use.
        model: ignored.
        delay_unscale: leave the gradients scaled because another backward pass precedes the step.
        delay_overflow_check: ignored.

    An exception in the block leaves the gradients as they were before it, except those that `delay_unscale`
    left scaled, to which a part of the failed backward pass may have been added.

    Raises:
        RuntimeError: `initialize` was not called.
    """
    if _state.chosen is None:
        yield loss
        return
    scaler, chosen = _state.scalers[loss_id], _as_list(optimizers)
    earlier = [] if delay_unscale else [_set_aside(optimizer) for optimizer in chosen]
    try:
        # apex patched only Python functions, so its backward passes ran without autocast.
        with amp_core.autocast(_state.device_type, enabled=False):
            yield loss.float() * scaler.state.scale
    except BaseException:
        _put_back(chosen, earlier)
        raise
    finally:
        torch.clear_autocast_cache()
    if delay_unscale:
        for optimizer in chosen:
            optimizer._amp_scaled = True
    else:
        _unscale(scaler, chosen, earlier)


def _set_aside(optimizer: Optimizer) -> _Gradients:
    """Detach and return the gradients of earlier backward passes that are already unscaled."""
    masters = _models.masters_of(optimizer)
    still_scaled = _is_scaled(optimizer)  # those of masters arrive when they are unscaled
    params = [p for p in master_params(optimizer) if not still_scaled or p in masters]
    earlier = [(param, param.grad) for param in params]
    for param in params:
        param.grad = None
    return earlier


def _is_scaled(optimizer: Optimizer) -> bool:
    return bool(vars(optimizer).get("_amp_scaled", False))


def _put_back(optimizers: Sequence[Optimizer], earlier: Sequence[_Gradients]) -> None:
    """Undo `_set_aside` after a failed backward pass, and drop the gradients that it left."""
    for optimizer, before in zip(optimizers, earlier, strict=False):  # none if `delay_unscale`
        for param, grad in before:
            param.grad = grad
        if not _is_scaled(optimizer):
            _models.drop_gradients(optimizer)


@torch.no_grad()
def _unscale(scaler: _Scaler, optimizers: Sequence[Optimizer], earlier: Sequence[_Gradients]) -> None:
    overflow = False
    for optimizer, before in zip(optimizers, earlier, strict=True):
        vars(optimizer).pop("_amp_scaled", None)
        _models.move_gradients(optimizer)
        for part in group_by_device(optimizer, allow_fp16=True):
            flag = torch.zeros((), device=part.device)
            part.multiply_(torch.tensor(1.0 / scaler.state.scale, device=part.device), flag)
            overflow = overflow or bool(flag.item())
        _add(before)
    if not scaler.dynamic:
        return
    scaler.state = next_scale(scaler.state, overflow, scaler.schedule)
    if overflow:
        for optimizer in optimizers:
            _skip_next_step(optimizer)


def _add(earlier: _Gradients) -> None:
    for param, before in earlier:
        if before is not None:
            param.grad = before if param.grad is None else param.grad.add_(before)


def _skip_next_step(optimizer: Optimizer) -> None:
    """Make the next ``optimizer.step()`` only clear the gradients, as in apex."""
    if "step" in vars(optimizer):
        return

    def skip(closure: Any = None) -> None:
        if closure is not None:
            raise RuntimeError("amp_compat.apex does not support closures in optimizer.step.")
        del optimizer.step
        for param in _models.master_params(optimizer):
            param.grad = None

    optimizer.step = skip  # type: ignore[assignment, method-assign]


def state_dict() -> OrderedDict[str, dict[str, float | int]]:
    """Return the loss scales, in apex's form: ``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}}``."""
    entries = ((f"loss_scaler{i}", s.state) for i, s in enumerate(_state.scalers))
    return OrderedDict((key, {"loss_scale": s.scale, "unskipped": s.growth_tracker}) for key, s in entries)


def load_state_dict(state: dict[str, Any]) -> None:
    """Load the loss scales from `state`, saved by apex or `state_dict`.

    Raises:
        RuntimeError: the number of loss scales differs; nothing is changed.
    """
    names = [name for name in state if name.startswith("loss_scaler")]
    if len(names) != len(_state.scalers):
        raise RuntimeError(
            f"The state has {counted(len(names), 'loss scale')}, but "
            f"initialize(num_losses={len(_state.scalers)}) created {len(_state.scalers)}; pass the "
            f"num_losses that the state was saved with."
        )
    for index, scaler in enumerate(_state.scalers):
        entry = state[f"loss_scaler{index}"]
        scaler.state = ScaleState(float(entry["loss_scale"]), int(entry["unskipped"]))


def _new_scaler(loss_scale: LossScale, low: float | None, high: float) -> _Scaler:
    dynamic = loss_scale == "dynamic"
    start = min(high, 2.0**16) if dynamic else float(loss_scale)
    schedule = LossScaleSchedule(max_scale=high or math.inf)
    return _Scaler(ScaleState(start), replace(schedule, min_scale=low) if low else schedule, dynamic)


def _check_float32(models: Sequence[nn.Module]) -> None:
    for model in models:
        for name, param in model.named_parameters():
            if param.is_floating_point() and param.dtype is not torch.float32:
                raise RuntimeError(
                    f"Found param {name} with type {param.dtype}, expected torch.float32. "
                    "initialize casts the model itself: do not call .half() before."
                )


def _device_type(models: Sequence[nn.Module]) -> str:
    devices = (param.device.type for model in models for param in model.parameters())
    return next(devices, "cpu")


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _reset() -> None:
    global _state  # noqa: PLW0603  # one per process
    _state.region.close()
    _state = _State()
