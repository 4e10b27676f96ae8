"""`GradScaler`: keeps small gradients from vanishing in a low-precision backward."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from amp_core._torch import internals as _torch
from amp_core.common.containers import map_tensors
from amp_core.common.device_types import device_type_of
from amp_core.plugin.default_manager import get_backend
from amp_core.scaling.arithmetic import as_of_now, combine, is_tracing
from amp_core.scaling.closure import ClosureSteps
from amp_core.scaling.distributed import check_group
from amp_core.scaling.fused import is_traceable, step_fused
from amp_core.scaling.gradients import by_device, gather, parameters_of
from amp_core.scaling.overlap import Overlap
from amp_core.scaling.step_record import StepRecord
from amp_core.states.loss_scale import LossScaleSchedule, OptState, next_stage

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["GradScaler", "OptState"]

_CLOSURE = "Closure use is not currently supported if GradScaler is enabled."


class GradScaler(ClosureSteps):
    """Scale losses up, gradients down, and skip steps whose gradients are not finite.

    Drop-in for ``torch.amp.GradScaler``: an instance of it, with the same arguments, errors, warnings
    and ``state_dict``. Beyond it: `step` can clip, each step leaves a `StepRecord`, the scale never
    reaches zero, and arguments are checked.

    Args:
        device: a device type with a backend, a ``torch.device``, a tensor, or ``"auto"``.
        init_scale: the first scale; positive and finite.
        growth_factor: see `LossScaleSchedule`.
        backoff_factor: see `LossScaleSchedule`.
        growth_interval: see `LossScaleSchedule`.
        enabled: ``False`` makes every method pass through.
        schedule: a whole `LossScaleSchedule` (floor, ceiling, hysteresis), in place of the three arguments.
        allow_fp16_gradients: accept float16 gradients, which torch refuses.
        named_parameters: ``model.named_parameters()``, so that records name parameters.
        history: the number of steps that `history` keeps.
        warn_after: warn when this many steps of one optimizer in a row were skipped; 0 for never.
        schedules: the schedules of keys (see `scale`) that have another than the scaler's.
        process_group: the ranks that share the parameters and must all step or all skip. They agree on
            overflow and norm in one collective of two numbers. By default the ranks of the widest mesh if
            gradients are DTensors, as under ``fully_shard``, else nobody. It is not pickled.
        overlap: read gradients for norm and overflow while the backward still runs, soon after each was
            written, so that after it only the step is left. Begins with the second step of an optimizer.

    Raises:
        BackendNotFoundError: nothing serves the device type.
        AssertionError: a factor is on the wrong side of 1; torch's text.
        ValueError: any other argument is out of range.
    """

    _warning_stacklevel: ClassVar[int] = 2
    """Frames from the warning to the caller's line; a subclass that calls ``super().__init__`` adds one."""

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        schedule: LossScaleSchedule | None = None,
        allow_fp16_gradients: bool = False,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
        history: int = 1000,
        warn_after: int = 25,
        schedules: Mapping[str, LossScaleSchedule] | None = None,
        process_group: ProcessGroup | None = None,
        overlap: bool = False,
    ) -> None:
        self._device = device_type_of(device)
        refusal = get_backend(self._device).scaler_refusal() if enabled else None
        if refusal is not None:
            warnings.warn(refusal.message, stacklevel=self._warning_stacklevel)
        self._enabled = enabled and refusal is None
        self._schedule = schedule or (
            LossScaleSchedule(growth_factor, backoff_factor, growth_interval)
            if self._enabled
            else LossScaleSchedule()
        )
        if not self._enabled:
            return
        self._start(init_scale, history)
        self._allow_fp16 = allow_fp16_gradients
        self._names = {id(p): name for name, p in named_parameters}
        self._warn_after = warn_after
        self._process_group = check_group(process_group)
        self._overlap = Overlap() if overlap else None
        self._start_keys(init_scale, schedules or {})

    def name_parameters(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Let step records name these parameters, beside those named before.

        Args:
            named_parameters: ``model.named_parameters()``.
        """
        if self._enabled:
            self._names.update((id(p), name) for name, p in named_parameters)

    # -- scaling ---------------------------------------------------------------------------------

    def scale(self, outputs: Any, key: str | None = None) -> Any:
        """Multiply `outputs` by the scale.

        Args:
            outputs: a tensor, or any nest of containers of tensors (`amp_core.common.containers`). float16
                tensors come back as float32, where the product does not overflow.
            key: give the loss a scale of its own, with a schedule of its own. The same key then goes to
                `step` (and `unscale_`, `clip_grad_norm_`) for the optimizer that steps on its gradients.

        Raises:
            ValueError: something in it is no tensor; torch's text.
        """
        if not self._enabled:
            return outputs
        if key is not None:
            return self._making_key(key).scale(outputs)
        return map_tensors(outputs, self._scaled, other=_refuse_output)

    def _scaled(self, tensor: Tensor) -> Tensor:
        wide = tensor.float() if tensor.dtype is torch.float16 else tensor
        return wide * self._scale_on(tensor.device).to(tensor.device, non_blocking=True)

    # -- stepping --------------------------------------------------------------------------------

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        key: str | None = None,
        **kwargs: Any,
    ) -> float | None:
        """Take the optimizer's step on the true gradients, or skip it if one is not finite.

        Optimizers that take ``grad_scale`` and ``found_inf`` (torch's fused ones) unscale, clip and
        decide on the device, and nothing waits. For the others the host waits once.

        Args:
            optimizer: steps, or is skipped.
            args: passed on to ``optimizer.step``.
            max_norm: clip the gradients to this norm in the same passes.
            norm_type: the order of that norm.
            key: of the loss that made the gradients, if it was scaled under one.
            kwargs: passed on to ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returns; ``None`` when it is skipped (see `last_step`).

        Raises:
            RuntimeError: it was called before since the last `update`, or given a closure; torch's texts
                (see `step_closure`).
            AssertionError: nothing was scaled yet, or the optimizer has no gradient at all.
        """
        if not self._enabled:
            if max_norm is not None:
                self.clip_grad_norm_(optimizer, max_norm, norm_type)
            return cast("float | None", optimizer.step(*args, **kwargs))
        if "closure" in kwargs or (args and callable(args[0])):
            raise RuntimeError(_CLOSURE)
        owner = self._scaler_of(optimizer, key, "step")
        if owner is not self:
            return owner.step(optimizer, *args, max_norm=max_norm, norm_type=norm_type, **kwargs)
        if not is_traceable(optimizer) if is_tracing() else _torch.frames_are_compiled() is not None:
            return _step_eagerly(self, optimizer, max_norm, norm_type, args, kwargs)
        return self._step(optimizer, max_norm, norm_type, args, kwargs)

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None,
        norm_type: float,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> float | None:
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states.of(optimizer)
        stage = next_stage(state["stage"], "step")
        if self._overlap is not None and not is_tracing():
            self._overlap.watch(optimizer)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            result = step_fused(self, optimizer, state, scale, max_norm, norm_type, args, kwargs)
        else:
            result = self._step_plain(optimizer, state, max_norm, norm_type, args, kwargs)
        state["stage"] = stage
        return result

    def _step_plain(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        max_norm: float | None,
        norm_type: float,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> float | None:
        if max_norm is not None:
            self.clip_grad_norm_(optimizer, max_norm, norm_type)
        elif state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        found = list(state["found_inf_per_device"].values())
        if not found:
            raise AssertionError(_no_gradients(optimizer))
        record = self._record(optimizer, state)
        if self._maybe_skip(optimizer, record):
            return None
        return cast("float | None", optimizer.step(*args, **kwargs))

    def _maybe_skip(self, optimizer: torch.optim.Optimizer, record: StepRecord) -> bool:
        skipped = record.skipped  # the one wait for the device
        if skipped and record._micro_batches is None:
            record._bad = self._bad_parameters(optimizer)
        return skipped

    def _record(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> StepRecord:
        scale = cast(Tensor, self._scale)
        record = StepRecord(
            number=self._updates,
            optimizer=type(optimizer).__name__,
            _found_inf=combine(list(state["found_inf_per_device"].values()), scale.device),
            _scale_before=as_of_now(scale),
            _total_norm=state.pop("norm", None),
            key=self._key,
        )
        if "window" in state:
            record._micro_batches, record._params, record._nonfinite = state.pop("window")
        self.history.append(record)
        self._since_update.append(record)
        self.last_step[optimizer] = record
        return record

    # -- torch's private names, which libraries call ---------------------------------------------

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._per_optimizer_states.of(optimizer)
        parts = gather(optimizer, allow_fp16=True)
        state["found_inf_per_device"] = by_device([(p.device, p.grad_stats(2.0).found_inf) for p in parts])
        return cast("dict[str, Any]", state["found_inf_per_device"])  # torch's annotation; devices in truth

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = self._per_optimizer_states.of(optimizer)
        return cast("dict[str, Any]", state["found_inf_per_device"])


_step_eagerly = _torch.outside_graphs(GradScaler._step)


def _refuse_output(value: Any) -> Any:  # noqa: ARG001
    raise ValueError("outputs must be a Tensor or an iterable of Tensors")


def _no_gradients(optimizer: torch.optim.Optimizer) -> str:
    count = len(parameters_of(optimizer))
    return (
        f"No inf checks were recorded for this optimizer. None of the {count} parameters of this "
        f"{type(optimizer).__name__} has a gradient: either no backward pass reached them, or they were set "
        f"to None by zero_grad() before step()."
    )
