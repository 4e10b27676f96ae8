"""The scale itself: on which device it lives, how it moves, how it is saved."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from amp_core.kernels import ScaleTensors
from amp_core.scaling.arithmetic import as_of_now, combine, is_tracing, valid_scale
from amp_core.scaling.gradients import kernels_of
from amp_core.scaling.replicate import OptimizerStates
from amp_core.scaling.step_record import History, StepRecord
from amp_core.scaling.warnings_and_callbacks import Reporting
from amp_core.states.loss_scale import LossScaleSchedule, further_fields, known_fields

_NO_SCALE = (
    "This may indicate your script did not use scaler.scale(loss or outputs) earlier in the iteration."
)


class ScaleKeeper(Reporting):
    """The half of `GradScaler` that has to do with the scale and not with optimizers."""

    _device: str
    _enabled: bool
    _schedule: LossScaleSchedule
    history: History
    last_step: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepRecord]

    def _start(self, init_scale: float, history: int) -> None:
        within = max(valid_scale(init_scale), self._schedule.min_scale)
        self._init_scale = min(within, self._schedule.max_scale)
        self._init_growth_tracker = 0
        self._init_hysteresis_left = self._schedule.hysteresis
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._hysteresis_left: Tensor | None = None
        self._per_optimizer_states: OptimizerStates = OptimizerStates()
        self._updates = 0
        self._since_update: list[StepRecord] = []
        self.history = History(history)
        self.last_step = weakref.WeakKeyDictionary()
        self._start_reporting()

    def _scale_on(self, device: torch.device) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return self._scale

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        assert self._growth_tracker is None, "_growth_tracker initialized before _scale"
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)
        self._hysteresis_left = torch.full((), self._init_hysteresis_left, dtype=torch.int32, device=dev)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        assert self._scale is not None, f"Attempted {funcname} but _scale is None.  {_NO_SCALE}"
        assert self._growth_tracker is not None, (
            f"Attempted {funcname} but _growth_tracker is None.  {_NO_SCALE}"
        )
        return self._scale, self._growth_tracker

    # -- the scale -------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale: down after a skipped step, up after enough steps in a row; on the device.

        Args:
            new_scale: set the scale to this number or one-element tensor instead.

        Raises:
            AssertionError: no step or `unscale_` since the last update, or `new_scale` is no such tensor;
                torch's texts.
            ValueError: `new_scale` is not positive and finite, as far as the host can see.
        """
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        before = None if is_tracing() else self._seen_by_hooks(scale)
        if new_scale is not None:
            self._set_scale(scale, new_scale)
        else:
            found = self._per_optimizer_states.found_infs()
            if not found:  # no assert statement: Dynamo would turn it into an operation
                raise AssertionError("No inf checks were recorded prior to update.")
            tensors = ScaleTensors(scale, tracker, cast(Tensor, self._hysteresis_left))
            kernels_of(scale.device).update_scale_(tensors, combine(found, scale.device), self._schedule)
        self._per_optimizer_states = OptimizerStates()
        if not is_tracing():
            self._close_records(scale, before)

    def _seen_by_hooks(self, scale: Tensor) -> Tensor | None:
        # Where there are records, they know it.
        return scale.clone() if not self._since_update and self._hooks.anyone() else None

    def _close_records(self, scale: Tensor, before: Tensor | None) -> None:
        after = as_of_now(scale)
        records, self._since_update = self._since_update, []
        for record in records:
            record._scale_after = after
        self._updates += 1
        self._report(records, before)

    def _set_scale(self, scale: Tensor, new_scale: float | Tensor) -> None:
        if not isinstance(new_scale, Tensor):
            scale.fill_(valid_scale(new_scale))
            return
        right = (new_scale.device.type, new_scale.numel(), new_scale.requires_grad)
        assert right == (self._device, 1, False), (
            "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
            "torch.FloatTensor with requires_grad=False."
        )
        if new_scale.device.type == "cpu" and not is_tracing():
            valid_scale(new_scale.item())
        fits = (new_scale > 0) & new_scale.isfinite()
        scale.copy_(torch.where(fits, new_scale, scale).reshape(()))

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def get_scale(self) -> float:
        """Return the scale, 1.0 if disabled; waits for the device."""
        if not self._enabled:
            return 1.0
        return self._init_scale if self._scale is None else float(self._scale.item())

    def _get_growth_tracker(self) -> int:
        if not self._enabled:
            return 0
        tracker = self._growth_tracker
        return self._init_growth_tracker if tracker is None else int(tracker.item())

    @property
    def schedule(self) -> LossScaleSchedule:
        """The rule by which the scale moves."""
        return self._schedule

    def get_growth_factor(self) -> float:
        """Return what the scale grows by."""
        return self._schedule.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale grows by; above 1."""
        self._schedule = replace(self._schedule, growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """Return what the scale is multiplied by at an overflow."""
        return self._schedule.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by at an overflow; between 0 and 1."""
        self._schedule = replace(self._schedule, backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Return the number of finite steps in a row before the scale grows."""
        return self._schedule.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of finite steps in a row before the scale grows."""
        self._schedule = replace(self._schedule, growth_interval=new_interval)

    # torch keeps these three as attributes, and libraries read them.
    _growth_factor = property(get_growth_factor, set_growth_factor)
    _backoff_factor = property(get_backoff_factor, set_backoff_factor)
    _growth_interval = property(get_growth_interval, set_growth_interval)

    def is_enabled(self) -> bool:
        """Return whether this scaler does anything."""
        return self._enabled

    # -- saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format; empty if disabled. Waits for the device."""
        if not self._enabled:
            return {}
        state = {
            "scale": self.get_scale(),
            "growth_factor": self._schedule.growth_factor,
            "backoff_factor": self._schedule.backoff_factor,
            "growth_interval": self._schedule.growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
        }
        if self._schedule.hysteresis > 1:
            state["_hysteresis_left"] = self._get_hysteresis_left()
        further = further_fields(self._schedule)
        return {**state, "_schedule": further} if further else state

    def _get_hysteresis_left(self) -> int:
        left = self._hysteresis_left
        return self._init_hysteresis_left if left is None else int(left.item())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict`, or torch's, returned; nothing is changed where an entry is missing.

        Raises:
            RuntimeError: it is empty; torch's text.
            KeyError: an entry is missing.
            ValueError: an entry is out of range.
        """
        if not self._enabled:
            return
        if len(state_dict) == 0:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved "
                "from a disabled instance of GradScaler."
            )
        schedule = replace(
            self._schedule,
            growth_factor=state_dict["growth_factor"],
            backoff_factor=state_dict["backoff_factor"],
            growth_interval=state_dict["growth_interval"],
            **known_fields(state_dict.get("_schedule", {})),
        )
        scale, tracker = valid_scale(state_dict["scale"]), int(state_dict["_growth_tracker"])
        self._init_hysteresis_left = int(state_dict.get("_hysteresis_left", schedule.hysteresis))
        self._schedule, self._init_scale, self._init_growth_tracker = schedule, scale, tracker
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(scale)
            self._growth_tracker.fill_(tracker)
            cast(Tensor, self._hysteresis_left).fill_(self._init_hysteresis_left)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self._enabled:
            recorded = self._per_optimizer_states or self._per_optimizer_states.orphans
            assert not recorded, (
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
            state["_init_scale"] = self.get_scale()
            state["_init_growth_tracker"] = self._get_growth_tracker()
            state["_init_hysteresis_left"] = self._get_hysteresis_left()
            state["_scale"] = state["_growth_tracker"] = state["_hysteresis_left"] = None
            # ids and tensors of this process mean nothing in another
            state.update(
                _names={}, history=None, last_step=None, _per_optimizer_states=None, _since_update=[]
            )
            state.update(_hooks=None, _in_a_row=None, _described=None, _process_group=None)
            state["_history_size"] = self.history._records.maxlen
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._enabled:
            self.history = History(self.__dict__.pop("_history_size"))
            self._per_optimizer_states = OptimizerStates()
            self._start_reporting()
            self.last_step = weakref.WeakKeyDictionary()
