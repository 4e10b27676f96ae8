"""`GradScaler`: keeps small gradients from vanishing in a low-precision backward."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from amp_core import _torch
from amp_core.containers import map_tensors
from amp_core.device import device_type_of
from amp_core.plugin.manager import get_backend
from amp_core.scaler.arithmetic import clip_coefficient, combine, reciprocal, zero
from amp_core.scaler.closure import ClosureSteps
from amp_core.scaler.distributed import agree_on_flag, ranks_of
from amp_core.scaler.fused import is_traceable, step_fused
from amp_core.scaler.gradients import Gradients, Look, by_device, gather, is_tracing, look
from amp_core.scaler.overlap import Overlap
from amp_core.scaler.record import StepRecord
from amp_core.scaler.replicate import _MultiDeviceReplicator
from amp_core.state import OptState, Schedule, next_stage

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
        growth_factor: see `Schedule`.
        backoff_factor: see `Schedule`.
        growth_interval: see `Schedule`.
        enabled: ``False`` makes every method pass through.
        schedule: a whole `Schedule` (floor, ceiling, hysteresis), in place of the three arguments.
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
        schedule: Schedule | None = None,
        allow_fp16_gradients: bool = False,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
        history: int = 1000,
        warn_after: int = 25,
        schedules: Mapping[str, Schedule] | None = None,
        process_group: ProcessGroup | None = None,
        overlap: bool = False,
    ) -> None:
        self._device = device_type_of(device)
        refusal = get_backend(self._device).scaler_refusal() if enabled else None
        if refusal is not None:
            warnings.warn(refusal.message, stacklevel=self._warning_stacklevel)
        self._enabled = enabled and refusal is None
        self._schedule = schedule or (
            Schedule(growth_factor, backoff_factor, growth_interval) if self._enabled else Schedule()
        )
        if not self._enabled:
            return
        self._start(init_scale, history)
        self._allow_fp16 = allow_fp16_gradients
        self._names = {id(p): name for name, p in named_parameters}
        self._warn_after = warn_after
        self._process_group = process_group
        self._overlap = Overlap() if overlap else None
        self._start_keys(init_scale, schedules or {})

    # -- scaling ---------------------------------------------------------------------------------

    def scale(self, outputs: Any, key: str | None = None) -> Any:
        """Multiply `outputs` by the scale.

        Args:
            outputs: a tensor, or any nest of containers of tensors (`amp_core.containers`). float16
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
        copies: list[_MultiDeviceReplicator] = []

        def apply(tensor: Tensor) -> Tensor:
            if not copies:
                copies.append(_MultiDeviceReplicator(self._scale_on(tensor.device)))
            wide = tensor.float() if tensor.dtype is torch.float16 else tensor
            return wide * copies[0].get(tensor.device)

        return map_tensors(outputs, apply, other=_refuse_output)

    # -- unscaling and clipping ------------------------------------------------------------------

    def unscale_(self, optimizer: torch.optim.Optimizer, key: str | None = None) -> None:
        """Divide the gradients of `optimizer` by the scale, in place, and note whether all are finite.

        Does not wait for the device. Needed only to look at or change gradients before `step`.

        Raises:
            RuntimeError: it was called before since the last `update`, or after `step`; torch's texts.
            AssertionError: nothing was scaled yet; torch's text.
            ValueError: a gradient is float16 and ``allow_fp16_gradients`` is not set.
        """
        if not self._enabled:
            return
        owner = self._scaler_of(optimizer, key, "unscale_")
        if owner is not self:
            owner.unscale_(optimizer)
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states.of(optimizer)
        stage = next_stage(state["stage"], "unscale_")
        state["found_inf_per_device"] = self._unscale_grads_(
            optimizer, reciprocal(scale), zero(scale.device), self._allow_fp16
        )
        state["stage"] = stage

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        factors, flags = _MultiDeviceReplicator(inv_scale), _MultiDeviceReplicator(found_inf.clone())
        with torch.no_grad():
            parts = gather(optimizer, allow_fp16=allow_fp16)
            for part in parts:
                part.scale_(factors.get(part.device), flags.get(part.device))
        found = flags._per_device_tensors
        ranks = ranks_of(parts, self._process_group)
        if ranks is None:
            return found
        device = found_inf.device
        return {device: agree_on_flag(list(found.values()), ranks, device)}

    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        key: str | None = None,
    ) -> Tensor:
        """Unscale and clip the gradients of `optimizer` in one read and one read-write.

        Does not wait for the device, unless `error_if_nonfinite`.

        Args:
            optimizer: its gradients are left unscaled and clipped, as by `unscale_` and
                ``torch.nn.utils.clip_grad_norm_``.
            max_norm: the greatest norm of all gradients together.
            norm_type: the order of the norm.
            error_if_nonfinite: raise where the norm is not finite.
            key: of the loss that made the gradients, if it was scaled under one.

        Returns:
            0-dim tensor: the norm of the true gradients, before clipping.

        Raises:
            RuntimeError: after `step`; or `error_if_nonfinite` and the norm is not finite.
        """
        if not self._enabled:
            return torch.nn.utils.clip_grad_norm_(
                _parameters(optimizer), max_norm, norm_type, error_if_nonfinite
            )
        owner = self._scaler_of(optimizer, key, "clip_grad_norm_")
        if owner is not self:
            return owner.clip_grad_norm_(optimizer, max_norm, norm_type, error_if_nonfinite)
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        state = self._per_optimizer_states.of(optimizer)
        unscaled = state["stage"] is OptState.UNSCALED
        stage = state["stage"] if unscaled else next_stage(state["stage"], "unscale_")
        inverse = torch.ones_like(scale) if unscaled else reciprocal(scale)
        parts = gather(optimizer, allow_fp16=self._allow_fp16)
        seen = look(parts, norm_type, scale.device, self._process_group, self._overlap)
        state["looked"] = parts, seen.measured
        norm = seen.norm * inverse
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
                f"cannot be clipped. To disable this error and scale the gradients by the non-finite norm "
                f"anyway, set `error_if_nonfinite=False`"
            )
        # A norm that is NaN would make all gradients NaN, and so hide which of them were.
        coefficient = clip_coefficient(norm, max_norm).nan_to_num(nan=1.0)
        self._multiply(parts, inverse * coefficient, seen, state)
        state["stage"], state["norm"] = stage, norm
        return norm

    def _multiply(self, parts: list[Gradients], factor: Tensor, seen: Look, state: dict[str, Any]) -> None:
        factors = _MultiDeviceReplicator(factor.float())
        flags, left = list(state["found_inf_per_device"].items()), dict(seen.flags)
        with torch.no_grad():
            for part in parts:
                before = left.pop(part.device, None)
                flag = zero(part.device) if before is None else before.clone()
                part.scale_(factors.get(part.device), flag)
                flags.append((part.device, flag))
        state["found_inf_per_device"] = by_device([*flags, *left.items()])

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
            _scale_before=scale.clone(),
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
        state["found_inf_per_device"] = by_device([(p.device, p.measure(2.0).found_inf) for p in parts])
        return cast("dict[str, Any]", state["found_inf_per_device"])  # torch's annotation; devices in truth

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = self._per_optimizer_states.of(optimizer)
        return cast("dict[str, Any]", state["found_inf_per_device"])


_step_eagerly = _torch.outside_graphs(GradScaler._step)


def _refuse_output(value: Any) -> Any:  # noqa: ARG001
    raise ValueError("outputs must be a Tensor or an iterable of Tensors")


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _no_gradients(optimizer: torch.optim.Optimizer) -> str:
    count = len(_parameters(optimizer))
    return (
        f"No inf checks were recorded for this optimizer. None of the {count} parameters of this "
        f"{type(optimizer).__name__} has a gradient: either no backward pass reached them, or they were set "
        f"to None by zero_grad() before step()."
    )
