"""`GradScaler`: keeps small gradients from vanishing in a low-precision backward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from amp_core._torch.steps import is_fused
from amp_core._torch.tracing import dynamo_callback, outside_graphs
from amp_core.common.arguments import as_max_norm, as_number, as_order, device_type_of, named_tensors
from amp_core.common.call_site import level_outside
from amp_core.common.containers import map_tensors
from amp_core.common.optimizers import parameters_of, take_step
from amp_core.common.text import counted
from amp_core.errors import AmpWarning, BackendNotFoundError
from amp_core.kernels.memory import on_host, read
from amp_core.plugin.default_manager import get_backend
from amp_core.plugin.results import Refusal
from amp_core.scaling import fused
from amp_core.scaling.arithmetic import combine, is_tracing, reciprocal
from amp_core.scaling.closure import Closure, check_closure, evaluate, step_whole
from amp_core.scaling.grad_passes import by_device
from amp_core.scaling.hooks import ScaleHook, StepHook, add_hook
from amp_core.scaling.loss_scale import LossScale
from amp_core.scaling.loss_scales import Entry, LossScales, as_list
from amp_core.scaling.mixed import is_clipped, note_clipped, note_unscaled
from amp_core.scaling.optimizer_state import as_state
from amp_core.scaling.step_log import StepLog
from amp_core.scaling.step_record import History, StepRecord
from amp_core.scaling.torch_names import TorchNames
from amp_core.scaling.unscaler import Unscaler
from amp_core.states.loss_scale import LossScaleSchedule, OptState, next_stage

__all__ = ["GradScaler", "OptState"]

T = TypeVar("T")


class GradScaler(TorchNames):
    """Scale losses up, unscale gradients, and skip steps whose gradients are not finite.

    A drop-in for ``torch.amp.GradScaler``: a subclass of it with the same arguments, errors, warnings and
    ``state_dict``. In addition, `step` can clip, each step leaves a `StepRecord`, several losses can have
    scales of their own, the scale never reaches zero, and arguments are checked.

    Args:
        device: a device type with a backend, a ``torch.device``, a tensor, or ``"auto"``. Anything else
            gets a warning, since torch accepts it: the scale lives on the device of the first loss anyway.
        init_scale: the initial scale; positive and finite in float32.
        growth_factor: see `LossScaleSchedule`.
        backoff_factor: see `LossScaleSchedule`.
        growth_interval: see `LossScaleSchedule`.
        enabled: ``False`` turns every method into a pass-through.
        schedule: a complete `LossScaleSchedule` (floor, ceiling, hysteresis); replaces the three arguments.
        allow_fp16_gradients: accept float16 gradients, which torch refuses.
        named_parameters: ``model.named_parameters()``; records then name parameters.
        history: the number of steps that `history` keeps; None for all.
        warn_after: warn when this many steps of one optimizer in a row were skipped; 0 for never.
        schedules: for each key (see `scale`) that needs one, a schedule of its own.
        process_group: the ranks that share the parameters and must all step or all skip. They agree on
            overflow and norm in one collective of two numbers. By default these are the ranks of the widest
            mesh if gradients are DTensors, as under ``fully_shard``; otherwise ranks do not communicate.
            ``FullyShardedDataParallel`` needs it: ``process_group=model.process_group``. With a wider group
            (all ranks, under ``HYBRID_SHARD``), describe the parameters by `sharded_over`. It is not pickled:
            on several ranks, an unpickled scaler refuses to step.
        sharded_over: process group or mesh -> the parameters of which its ranks hold different parts, though
            they are not DTensors on it: pipeline stages, experts, tensors that the trainer cut itself. A
            parameter under several groups is cut over all of them. The norm then counts each element once.
            It needs `process_group`.
        overlap: compute norm and overflow during the backward, soon after each gradient is written, so
            that only the step itself remains. Takes effect after the first step that clips, or of a fused
            optimizer: others need neither.

    Raises:
        BackendLoadError: the backend of the device type failed to load.
        BackendDisabledError: ``AMP_DISABLE_BACKENDS`` names the device type.
        AssertionError: a factor is on the wrong side of 1; torch's text.
        TypeError: an argument has the wrong type.
        ValueError: any other argument is out of range, or `growth_interval` is no whole number.

    Example::

        scaler = GradScaler("cpu", named_parameters=model.named_parameters())
        for inputs, targets in batches:
            optimizer.zero_grad()
            with autocast("cpu", dtype=torch.float16):
                loss = loss_fn(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
    """

    _warning_stacklevel: ClassVar[int] = 2
    """Frames from the warning to the caller's line; a subclass that calls ``super().__init__`` adds one."""

    def __init__(
        self,
        device: str | torch.device | Tensor = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        schedule: LossScaleSchedule | None = None,
        allow_fp16_gradients: bool = False,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
        history: int | None = 1000,
        warn_after: int = 25,
        schedules: Mapping[str, LossScaleSchedule] | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        sharded_over: Mapping[torch.distributed.ProcessGroup | torch.distributed.DeviceMesh, Iterable[Tensor]]
        | None = None,
        overlap: bool = False,
    ) -> None:
        self._device, refusal = _checked_device(device, enabled, self._warning_stacklevel + 1)
        if refusal is not None:
            warnings.warn(refusal.message, stacklevel=self._warning_stacklevel)
        self._enabled = enabled and refusal is None
        self._log = StepLog(history, warn_after, named_parameters if self._enabled else ())
        if not self._enabled:
            self._scales = LossScales(1.0, LossScaleSchedule() if schedule is None else schedule, {})
            return
        if schedule is None:
            schedule = LossScaleSchedule(growth_factor, backoff_factor, growth_interval)
        self._scales = LossScales(init_scale, schedule, {} if schedules is None else schedules)
        self._unscaler = Unscaler(
            self._log,
            allow_fp16=allow_fp16_gradients,
            process_group=process_group,
            sharded_over=sharded_over,
            overlap=overlap,
        )

    # -- scaling ---------------------------------------------------------------------------------

    @overload
    def scale(self, outputs: Tensor, key: str | None = None) -> Tensor: ...
    @overload
    def scale(self, outputs: T, key: str | None = None) -> T: ...
    def scale(self, outputs: Any, key: str | None = None) -> Any:
        """Multiply `outputs` by the scale.

        Args:
            outputs: a tensor, or any nesting of containers and other iterables of tensors. A float16 tensor
                comes back as float32, in which the product does not overflow.
            key: gives this loss a scale and a schedule of its own. Pass the same key to `step` (and
                `unscale_`, `clip_grad_norm_`) for the optimizer that uses its gradients.

        Returns:
            The products, in containers of the same types, of other iterables an iterator; `outputs` itself if
            the scaler is disabled.

        Raises:
            ValueError: `outputs` contains something that is not a tensor; torch's text.
            TypeError: `key` is not a string.

        Example::

            scaler.scale(loss).backward()
            scaler.scale(generator_loss, key="generator").backward()
        """
        if not self._enabled:
            return outputs
        loss_scale = self._scales.own if key is None else self._scales.for_loss(key)
        multiply = loss_scale.multiply
        if loss_scale.scale is None and self._overrides("_lazy_init_scale_growth_tracker", loss_scale):
            multiply = self._multiply_first
        return multiply(outputs) if isinstance(outputs, Tensor) else _scaled(outputs, multiply)

    def _multiply_first(self, tensor: Tensor) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(tensor.device)
        return self._scales.own.multiply(tensor)

    # -- stepping --------------------------------------------------------------------------------

    def step(
        self,
        optimizer: Optimizer,
        *args: Any,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        key: str | None = None,
        **kwargs: Any,
    ) -> float | None:
        """Unscale the gradients and step, or skip the step if one of them is not finite.

        Optimizers that take ``grad_scale`` and ``found_inf`` (torch's fused ones) unscale, clip and decide
        on the device, and nothing waits. For other optimizers the host waits once.

        Args:
            optimizer: takes the step.
            args: passed on to ``optimizer.step``.
            max_norm: clip the gradients to this norm in the same passes.
            norm_type: the order of the norm, above 0.
            key: the key that the loss was scaled under, if any.
            kwargs: passed on to ``optimizer.step``.

        Returns:
            The result of ``optimizer.step``; ``None`` if the step was skipped (see `last_step`).

        Raises:
            RuntimeError: it was called twice without `update` in between, or with a closure; torch's texts
                (see `step_closure`). Or `max_norm` is given, and a backward pass has added scaled gradients
                to unscaled ones. Or the optimizer had an `AccumulationWindow` together with others, and its
                gradients were not unscaled with theirs.
            RankLostError: ranks that must agree did not arrive.
            AssertionError: no loss was scaled yet; or no parameter has a gradient, or had one when the
                gradients were unscaled.
            ValueError: a gradient is float16, ``allow_fp16_gradients`` is not set, and the optimizer is not
                fused (torch accepts those, too); no loss was scaled under `key`; `max_norm` or `norm_type`
                is out of range; or one of `max_norm` and `key` is given, and ``optimizer.step`` takes
                ``grad_scaler``, so that it unscales by itself.
            TypeError: an argument has the wrong type.

        Example::

            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
        """
        if not self._enabled:
            if max_norm is not None:
                self.clip_grad_norm_(optimizer, max_norm, norm_type)
            return cast("float | None", take_step(optimizer, args, kwargs))
        if "closure" in kwargs or (args and callable(args[0])):
            raise RuntimeError(_CLOSURE)
        eagerly = not fused.is_traceable(optimizer) if is_tracing() else dynamo_callback() is not None
        if eagerly:
            return _step_eagerly(self, optimizer, key, max_norm, norm_type, args, kwargs)
        return self._step(optimizer, key, max_norm, norm_type, args, kwargs)

    def _step(
        self,
        optimizer: Optimizer,
        key: str | None,
        max_norm: float | None,
        norm_type: float,
        args: Any,
        kwargs: Any,
    ) -> float | None:
        entry = self._scales.enter([optimizer], key, "step")
        (state,) = entry.states
        stage = next_stage(state.stage, "step")
        step = self._step_fused if is_fused(optimizer) else self._step_plain
        state.undo = None
        try:
            result: float | None = step(entry, max_norm, norm_type, args, kwargs)
        except BaseException:
            if not is_tracing():
                self._log.withdraw(optimizer, entry.loss_scale, state)
            raise
        state.stage = stage
        return result

    def _step_plain(
        self, entry: Entry, max_norm: float | None, norm_type: float, args: Any, kwargs: Any
    ) -> Any:
        (optimizer,), loss_scale, _, (state,) = entry
        if max_norm is None:
            if state.stage is OptState.READY:
                self._unscale_as_overridden(entry)
        elif not is_clipped(entry, max_norm, norm_type):  # by this step, which raised then
            self._clip(entry, max_norm, norm_type)
        if not state.found_inf_per_device:
            raise AssertionError(_no_checks(optimizer))
        self._log.record(optimizer, loss_scale, state)
        try:
            return self._maybe_opt_step(optimizer, state, *args, **kwargs)  # type: ignore[arg-type]
        except BaseException:
            note_clipped(entry, max_norm, norm_type)
            raise

    def _maybe_opt_step(
        self,
        optimizer: Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        state = as_state(optimizer_state)
        if state.recorded is not state.found_inf_per_device:  # a subclass has a `step` of its own
            self._log.record(optimizer, self._scales.own, state)
        result: float | None = None if self._log.skipped(optimizer) else take_step(optimizer, args, kwargs)
        return result

    def _step_fused(
        self, entry: Entry, max_norm: float | None, norm_type: float, args: Any, kwargs: Any
    ) -> Any:
        (optimizer,), loss_scale, scale, (state,) = entry
        if fused.takes_scaler(optimizer):
            fused.refuse_beyond_scaler(optimizer, max_norm, loss_scale.key)
            warnings.warn(fused.PASSES_ITSELF, FutureWarning, stacklevel=level_outside())
            return take_step(optimizer, args, {**kwargs, "grad_scaler": self})
        ready = state.stage is not OptState.UNSCALED
        unchecked = not (ready or state.found_inf_per_device) and max_norm is None
        if unchecked and _has_gradients(optimizer):
            raise AssertionError(_no_checks(optimizer))
        if ready:
            state.restart()  # a step that raised may have left what it found in other gradients
        overridden = ready and self._check_as_overridden(entry)
        divisor = scale if overridden else None
        if max_norm is not None or (ready and not overridden):
            divisor = self._unscaler.find_divisor(entry, max_norm, norm_type)
        if not is_tracing():  # a growing history would recompile every step
            self._log.record(optimizer, loss_scale, state)
        found_inf = combine(state.flags(), scale.device)
        if overridden or not ready:  # other code may have summed flags of ranks: torch's kernels skip at 1.0
            found_inf = found_inf.sign()
        return fused.step_on_device(optimizer, divisor, found_inf, args, kwargs)

    def step_closure(
        self,
        optimizer: Optimizer,
        closure: Closure,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        key: str | None = None,
    ) -> Any:
        """Step an optimizer that calls `closure` once or more, such as LBFGS or SAM.

        The gradients of each evaluation are unscaled, clipped on request, and checked, which waits for the
        device. If one is not finite, the whole step is skipped: parameters and optimizer state are restored
        from a copy that is kept during the step.

        Args:
            optimizer: ``optimizer.step(closure)`` is called. If it starts from gradients that exist
                already (SAM), call `unscale_` first.
            closure: clears the gradients, computes the loss, calls ``scaler.scale(loss).backward()``, and
                returns the unscaled loss.
            max_norm: clip the gradients of each evaluation to this norm.
            norm_type: the order of the norm, above 0.
            key: the key that the closure scales the loss under, if any.

        Returns:
            The result of ``optimizer.step``; ``None`` if the step was skipped.

        Raises:
            RuntimeError: a step was taken since the last `update`; torch's text. Or a subclass overrides
                `_maybe_opt_step`, which decides before the closure has run, and not this method. Or an
                `AccumulationWindow` of the optimizer is open, or its gradients were unscaled under another
                key.
            AssertionError: the closure scaled no loss, left no gradient, or was not called.
            ValueError: as for `step`.
            TypeError: an argument has the wrong type.

        Example::

            def closure():
                optimizer.zero_grad()
                loss = loss_fn(model(inputs), targets)
                scaler.scale(loss).backward()
                return loss

            scaler.step_closure(optimizer, closure)
            scaler.update()
        """
        if not self._enabled:
            if max_norm is not None:
                max_norm, norm_type = as_max_norm(max_norm), as_number(norm_type, "norm_type")

            def clipped() -> Any:
                loss = evaluate(closure)
                if max_norm is not None:
                    self.clip_grad_norm_(optimizer, max_norm, norm_type)
                return loss

            return take_step(optimizer, (clipped,), {})
        if is_tracing() or dynamo_callback() is not None:
            return _step_closure_eagerly(self, optimizer, closure, key, max_norm, norm_type)
        return self._step_closure(optimizer, closure, key, max_norm, norm_type)

    def _step_closure(
        self,
        optimizer: Optimizer,
        closure: Closure,
        key: str | None,
        max_norm: float | None,
        norm_type: float,
    ) -> Any:
        check_closure(optimizer, closure)
        if max_norm is not None:
            max_norm, norm_type = as_max_norm(max_norm), as_order(norm_type)
        if self._overrides("_maybe_opt_step") and not self._overrides("step_closure"):
            raise RuntimeError(_OWN_DECISION.format(name=type(self).__name__))
        self._scales.refuse_in_window([optimizer], "step_closure")
        loss_scale = self._scales.in_use(optimizer, key, "step_closure") or self._scales.for_loss(key)
        state = loss_scale.optimizer_states.of(optimizer)
        stage = next_stage(state.stage, "step")

        def unscaled() -> Any:
            loss = evaluate(closure)
            entry = Entry([optimizer], loss_scale, loss_scale.check("step_closure"), [state])
            if max_norm is not None:
                self._clip(entry, max_norm, norm_type)
            elif state.stage is not OptState.UNSCALED:
                self._unscale_as_overridden(entry)
            return loss

        result, bad = step_whole(optimizer, unscaled, state, self._log)
        self._log.record(optimizer, loss_scale, state)._bad = bad
        state.stage = stage
        return result

    def unscale_(self, optimizer: Optimizer | Sequence[Optimizer], key: str | None = None) -> None:
        """Divide the gradients of `optimizer` by the scale, in place, and check whether all are finite.

        `step` does this by itself; call it only to read or change gradients before, or to let several
        optimizers step as one. Does not wait for the device.

        Args:
            optimizer: its gradients are unscaled. Of several optimizers, all step or none; those without
                gradients too.
            key: the key that the loss was scaled under, if any.

        Raises:
            RuntimeError: it was called twice without `update` in between, or after `step`; torch's texts.
            AssertionError: no loss was scaled yet; torch's text.
            ValueError: a gradient is float16 and ``allow_fp16_gradients`` is not set; no loss was scaled
                under `key`; or of several optimizers two share a parameter, or their losses have different
                keys.
            TypeError: an argument has the wrong type.

        Example::

            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
            scaler.step(optimizer)
        """
        if self._enabled:
            entry = self._scales.enter(as_list(optimizer), key, "unscale_")
            self._unscale(entry)
            note_unscaled(entry)

    def _unscale(self, entry: Entry) -> None:
        optimizers, _, scale, states = entry
        for state in states:
            stage = next_stage(state.stage, "unscale_")
        inverse = reciprocal(scale)
        found_inf = torch.zeros_like(inverse)  # half the time of zeros()
        allow_fp16 = self._unscaler.allow_fp16
        if self._overrides("_unscale_grads_"):
            found, *others = [self._unscale_grads_(o, inverse, found_inf, allow_fp16) for o in optimizers]
            if others:
                found = by_device([flag for flags in (found, *others) for flag in flags.items()])
        else:
            found = self._unscaler.unscale(optimizers, inverse, found_inf, allow_fp16=allow_fp16)
        for state in states:
            state.stage, state.found_inf_per_device = stage, found

    def _unscale_as_overridden(self, entry: Entry) -> None:
        if self._overrides("unscale_", entry.loss_scale):
            for optimizer in entry.optimizers:
                self.unscale_(optimizer)
        else:
            self._unscale(entry)

    def _clip(
        self, entry: Entry, max_norm: float, norm_type: float, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        ready = all([s.stage is OptState.READY and not s.delegated for s in entry.states])
        if ready and (self._overrides("unscale_", entry.loss_scale) or self._overrides("_unscale_grads_")):
            for state in entry.states:
                state.delegated = True  # the subclass may clip in turn
            try:
                self._unscale_as_overridden(entry)
            finally:
                for state in entry.states:
                    state.delegated = False
        return self._unscaler.clip(entry, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def _check_as_overridden(self, entry: Entry) -> bool:
        """Let a subclass check the gradients of a fused step; return whether it has a method for that."""
        (optimizer,), loss_scale, scale, (state,) = entry
        if self._overrides("_check_inf_per_device", loss_scale):
            self._check_inf_per_device(optimizer)
        elif self._overrides("_unscale_grads_"):
            self._check_by_unscaling(optimizer, scale, state)
        else:
            return False
        return True

    def clip_grad_norm_(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        key: str | None = None,
    ) -> Tensor:
        """Unscale and clip the gradients of `optimizer` in one read pass and one read-write pass.

        Afterwards the gradients are as `unscale_` and ``torch.nn.utils.clip_grad_norm_`` leave them. Does
        not wait for the device, unless `error_if_nonfinite` is set.

        Args:
            optimizer: its gradients are clipped. Several optimizers are clipped by the norm of all their
                gradients, and all step or none; those without gradients too.
            max_norm: the largest norm allowed, of all gradients together.
            norm_type: the order of the norm, above 0.
            error_if_nonfinite: raise if the norm is not finite.
            key: the key that the loss was scaled under, if any.

        Returns:
            0-dim tensor: the norm of the unscaled gradients before clipping.

        Raises:
            RuntimeError: it was called after `step`; or `error_if_nonfinite` is set and the norm is not
                finite; or only some of several optimizers were unscaled before; or a backward pass has added
                scaled gradients to unscaled ones.
            RankLostError: ranks that must agree did not arrive.
            AssertionError: no loss was scaled yet; torch's text.
            ValueError: a gradient is float16 and ``allow_fp16_gradients`` is not set; no loss was scaled
                under `key`; `max_norm` or `norm_type` is out of range; or of several optimizers two share a
                parameter, or their losses have different keys.
            TypeError: an argument has the wrong type.

        Example::

            norm = scaler.clip_grad_norm_(optimizer, max_norm=1.0)
            scaler.step(optimizer)
        """
        optimizers = as_list(optimizer)
        if not self._enabled:
            params = [param for each in optimizers for param in parameters_of(each)]
            norm_type = as_number(norm_type, "norm_type")
            return torch.nn.utils.clip_grad_norm_(
                params, as_max_norm(max_norm), norm_type, error_if_nonfinite
            )
        entry = self._scales.enter(optimizers, key, "clip_grad_norm_")
        norm = self._clip(entry, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        note_unscaled(entry)
        return norm

    # -- the scale -------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None, key: str | None = None) -> None:
        """Move the scale, on the device: down after a skipped step, up after enough steps in a row.

        Args:
            new_scale: set the scale to this number or 0-dim tensor instead.
            key: move only the scale of this key. By default every scale moves whose gradients were checked
                since the last update; with `new_scale`, the scale of losses without a key.

        Raises:
            AssertionError: no gradients were checked since the last update, or `new_scale` is a tensor of
                the wrong kind; torch's texts.
            TypeError: `new_scale` is not a number.
            ValueError: `new_scale` is a number, or a tensor on the CPU, that is not positive and finite in
                float32 (a tensor on another device then leaves the scale as it is); no loss was scaled
                under `key`.
            RuntimeError: gradients in an open `AccumulationWindow` have the scale; or `new_scale` is a tensor
                with dimensions, which torch refuses too.
            ScaleFloorError: gradients overflowed at the floor, and the schedule says `AtFloor.RAISE`.

        Example::

            scaler.step(optimizer)
            scaler.update()
        """
        if not self._enabled:
            return
        eagerly = self._log.has_pending() if is_tracing() else dynamo_callback() is not None
        if eagerly:  # records are made outside of graphs
            _update_eagerly(self, new_scale, key)
        else:
            self._update(new_scale, key)

    def _update(self, new_scale: float | Tensor | None, key: str | None) -> None:
        scales = self._scales.to_update(new_scale, key)
        tracing = is_tracing()
        before = [] if tracing else [self._log.scale_before(scale) for scale in scales]
        for scale in scales:
            if new_scale is None:
                scale.advance()
            else:
                scale.set(new_scale, self._device)
        if not tracing:
            self._close_records(scales, before)

    def _close_records(self, scales: list[LossScale], before: list[Tensor | None]) -> None:
        self._log.updates += 1
        error: Exception | None = None
        for scale, old in zip(scales, before, strict=True):
            try:
                self._log.close(self, scale, old)
            except Exception as raised:  # the other scales are reported all the same
                error = error or raised
        if error is not None:
            raise error

    def get_scale(self, key: str | None = None) -> float:
        """Return the scale, 1.0 if disabled; waits for the device.

        Args:
            key: return the scale of this key.

        Raises:
            ValueError: no loss was scaled under `key`.
            TypeError: `key` is no string.
        """
        if not self._enabled:
            return 1.0
        return self._scales.of(key).value()

    @property
    def schedule(self) -> LossScaleSchedule:
        """The rule by which the scale of losses without a key moves."""
        return self._scales.own.schedule

    def get_growth_factor(self) -> float:
        """Return the factor by which the scale grows."""
        return self._scales.own.schedule.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows.

        Args:
            new_factor: above 1.

        Raises:
            AssertionError: it is not above 1; torch's text.
            ValueError: it is not finite.
            TypeError: it is no number.
        """
        self._scales.own.schedule = replace(self._scales.own.schedule, growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """Return the factor by which an overflow lowers the scale."""
        return self._scales.own.schedule.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which an overflow lowers the scale.

        Args:
            new_factor: between 0 and 1.

        Raises:
            AssertionError: it is not below 1; torch's text.
            ValueError: it is not above 0.
            TypeError: it is no number.
        """
        self._scales.own.schedule = replace(self._scales.own.schedule, backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Return the number of finite steps in a row before the scale grows."""
        return self._scales.own.schedule.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of finite steps in a row before the scale grows.

        Args:
            new_interval: a positive number.

        Raises:
            ValueError: it is not a positive whole number.
        """
        self._scales.own.schedule = replace(self._scales.own.schedule, growth_interval=new_interval)

    def is_enabled(self) -> bool:
        """Return whether this scaler does anything."""
        return self._enabled

    # -- records and hooks -----------------------------------------------------------------------

    @property
    def history(self) -> History:
        """The last steps, oldest first, as `StepRecord` objects.

        Example::

            print(scaler.history)
        """
        return self._log.history

    @property
    def last_step(self) -> MutableMapping[Optimizer, StepRecord]:
        """The `StepRecord` of the last step of each optimizer; empty if the scaler is disabled.

        Example::

            if scaler.last_step[optimizer].skipped:
                print(scaler.last_step[optimizer])
        """
        return self._log.last_step

    def landed(self, optimizer: Optimizer | None = None) -> Tensor:
        """Return whether the last step was taken. Does not wait for the device; ``bool(...)`` of it does.

        Ranks that share the parameters get the same answer, as they take the same step.

        Args:
            optimizer: whose step; by default those of all optimizers that stepped between the same two
                updates as the latest.

        Returns:
            0-dim bool tensor on the device of the scale. True if all of these steps were taken, and always
            if the scaler is disabled.

        Raises:
            RuntimeError: there was no such step.

        Example::

            steps_taken = torch.zeros((), dtype=torch.int64, device="cpu")
            scaler.step(optimizer)
            steps_taken += scaler.landed(optimizer)
            scaler.update()
        """
        if not self._enabled:
            return torch.ones((), dtype=torch.bool, device="cpu")
        return self._log.landed(optimizer)

    def name_parameters(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Add names of parameters for step records.

        Args:
            named_parameters: ``model.named_parameters()``.

        Raises:
            TypeError: it does not give pairs of a name and a tensor.

        Example::

            scaler.name_parameters(model.named_parameters())
        """
        if self._enabled:
            self._log.names.update((id(p), name) for name, p in named_tensors(named_parameters))

    def register_step_hook(self, hook: StepHook) -> RemovableHandle:
        """Call ``hook(scaler, record)`` in each `update`, for each step since the update before.

        Hooks are called last, when the record is complete and the scale has moved. Their errors come out
        of `update`. While there is a hook, each `update` waits once for the device. A disabled scaler calls
        no hooks, and neither does an `update` inside a compiled graph.

        Args:
            hook: takes the scaler and a `StepRecord`.

        Returns:
            A handle: ``handle.remove()``, or ``with handle:``.

        Raises:
            TypeError: `hook` is not callable.

        Example::

            scaler.register_step_hook(lambda scaler, record: print(record))
        """
        return add_hook(self._log.hooks.step, hook)

    def register_skip_hook(self, hook: StepHook) -> RemovableHandle:
        """Call ``hook(scaler, record)`` for each skipped step; otherwise like `register_step_hook`.

        Example::

            scaler.register_skip_hook(lambda scaler, record: print(record.bad_parameters))
        """
        return add_hook(self._log.hooks.skip, hook)

    def register_scale_change_hook(self, hook: ScaleHook) -> RemovableHandle:
        """Call ``hook(scaler, change)`` in each `update` that moves the scale; see `register_step_hook`.

        Args:
            hook: takes the scaler and a `ScaleChange`.

        Returns:
            A handle: ``handle.remove()``, or ``with handle:``.

        Example::

            scaler.register_scale_change_hook(lambda scaler, change: print(change.before, change.after))
        """
        return add_hook(self._log.hooks.change, hook)

    def _overrides(self, name: str, loss_scale: LossScale | None = None) -> bool:
        """Whether a subclass has its own method of this name, to be called for gradients of `loss_scale`.

        Torch's methods know nothing of keys. Those that do not look for the scale serve any `loss_scale`.
        """
        if loss_scale is not None and loss_scale is not self._scales.own:
            return False
        if type(self) is GradScaler and name not in self.__dict__:
            return False
        # Under Dynamo, `__func__` of a bound method is never the function of the class.
        method = getattr(type(self), name) if is_tracing() else getattr(getattr(self, name), "__func__", None)
        return method is not getattr(GradScaler, name)

    # -- saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format, that of keys under ``"_keys"``; waits for the device.

        With `load_state_dict`, this is the ``Stateful`` protocol of ``torch.distributed.checkpoint``. That
        loads only entries that the new scaler has too: give it the same `schedule`, and name the keys in
        `schedules`.

        Returns:
            A dict of numbers, which ``torch.amp.GradScaler`` can load too; empty if disabled.

        Example::

            torch.save({"model": model.state_dict(), "scaler": scaler.state_dict()}, path)
        """
        return self._scales.state_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, or of that of torch's scaler.

        The state is checked first; after an error the scaler is as it was.

        Args:
            state_dict: the saved state. It is ignored if the scaler is disabled.

        Raises:
            RuntimeError: it is empty; torch's text.
            KeyError: an entry is missing.
            TypeError: it is not a mapping, or an entry has the wrong type.
            ValueError: an entry is out of range.
        """
        if not self._enabled:
            return
        if isinstance(state_dict, Mapping) and len(state_dict) == 0:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved "
                "from a disabled instance of GradScaler."
            )
        self._scales.load_state_dict(state_dict)

    def _rehearsing(self) -> dict[str, Any]:
        """Return attributes with which this scaler runs steps of which nothing remains, and tells nobody."""
        log = self._log.rehearsing()
        unscaler = self._unscaler.rehearsing(log)
        return {"_scales": self._scales.rehearsing(), "_log": log, "_unscaler": unscaler}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()  # `LossScale` refuses to be pickled while gradients are unscaled

    def __copy__(self) -> Self:  # by default, both would have one scale
        state = self.__getstate__()
        own = {name: value for name, value in state.items() if name in ("_scales", "_log", "_unscaler")}
        copied = object.__new__(type(self))
        copied.__setstate__({**state, **copy.deepcopy(own)})
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_scales" not in state:  # of an instance of torch's class, pickled before amp_compat.install()
            GradScaler.__init__(self, "cpu", enabled=state["_enabled"])
            for name in [name for name in state if isinstance(getattr(GradScaler, name, None), property)]:
                setattr(self, name, state.pop(name))
        self.__dict__.update(state)

    def __repr__(self) -> str:
        name = type(self).__name__
        if not self._enabled:
            return f"{name}({self._device!r}, enabled=False)"
        parts = [repr(self._device), f"scale={_shown(self._scales.own)}"]
        parts += [f"scale[{key!r}]={_shown(scale)}" for key, scale in self._scales.keyed.items()]
        parts += [f"{counted(len(self.history), 'step')} in history"]
        return f"{name}({', '.join(parts)})"


_step_eagerly = outside_graphs(GradScaler._step)
_step_closure_eagerly = outside_graphs(GradScaler._step_closure)
_update_eagerly = outside_graphs(GradScaler._update)

_OWN_DECISION = (
    "{name} overrides _maybe_opt_step, which decides on a step before it starts; step_closure decides after "
    "each call of the closure. Override step_closure, too."
)

_CLOSURE = "Closure use is not currently supported if GradScaler is enabled."


def _checked_device(device: Any, enabled: bool, stacklevel: int) -> tuple[Any, Refusal | None]:
    """Return the device type, and why its backend refuses a scaler."""
    try:
        device_type = device_type_of(device)
        return device_type, get_backend(device_type).scaler_refusal() if enabled else None
    except (BackendNotFoundError, ValueError) as error:
        if enabled:
            text = _UNKNOWN_DEVICE.format(device=device, error=str(error).rstrip("."))
            warnings.warn(text, AmpWarning, stacklevel)
        return device, None


_UNKNOWN_DEVICE = (
    "GradScaler({device!r}): {error}. The scale will be on the device of the first loss. Pass the type of "
    "that device, or 'auto'."
)


def _shown(loss_scale: LossScale) -> str:
    """Return the scale in words; does not wait for the device."""
    scale = loss_scale.scale
    if scale is None:
        return f"{loss_scale.init_scale:g}"
    return f"{read(scale):g}" if on_host(scale) else f"on {scale.device}"


def _scaled(outputs: Any, multiply: Callable[[Tensor], Tensor]) -> Any:
    return map_tensors(outputs, multiply, other=lambda value: _scaled_iterable(value, multiply))


def _scaled_iterable(value: Any, multiply: Callable[[Tensor], Tensor]) -> Any:
    """Return an iterator over the products of an iterable that is no container, such as ``dict.values()``."""
    if isinstance(value, Iterable) and not isinstance(value, str):  # which consists of itself
        return _scaled(iter(value), multiply)
    raise ValueError("outputs must be a Tensor or an iterable of Tensors")


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(param.grad is not None for param in parameters_of(optimizer))


def _no_checks(optimizer: Optimizer) -> str:
    text, name = "No inf checks were recorded for this optimizer.", type(optimizer).__name__
    if _has_gradients(optimizer):
        return (
            f"{text} The gradients of this {name} were computed after it was unscaled, when it had none, so "
            f"they are scaled and unchecked: call unscale_() or clip_grad_norm_() after backward()."
        )
    count = len(parameters_of(optimizer))
    return (
        f"{text} This {name} has {counted(count, 'parameter')}, none with a gradient: either no backward "
        f"pass reached them, or they were set to None by zero_grad() before step()."
    )
