"""One loss scale: its value, its schedule, where it lives, its saved state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_core.common.locks import new_lock
from amp_core.kernels import ScaleTensors
from amp_core.kernels.interface import as_int32
from amp_core.kernels.memory import on_host, read
from amp_core.scaling.arithmetic import combine, is_tracing, moved
from amp_core.scaling.gradients import kernels_of
from amp_core.scaling.optimizer_state import OptimizerStates
from amp_core.states.loss_scale import (
    AtFloor,
    LossScaleSchedule,
    ScaleState,
    known_fields,
    next_scale,
    saved_form,
    valid_scale,
)

_allocating = new_lock()

_NO_SCALE = (
    "This may indicate your script did not use scaler.scale(loss or outputs) earlier in the iteration."
)
_NO_CHECKS = (
    "No inf checks were recorded prior to update. No optimizer has stepped by this scaler since the last "
    "update: call scaler.step(optimizer), not optimizer.step(), before update()."
)
_WITH_DIMENSIONS = (
    "output with shape [] doesn't match the broadcast shape {shape}: new_scale must be a number or a tensor "
    "without dimensions. Pass new_scale.reshape(())."
)


class SavedScale(NamedTuple):
    """A saved state after all checks, ready to load."""

    schedule: LossScaleSchedule
    state: ScaleState


class LossScale:
    """A loss scale and the state of each optimizer whose gradients have it.

    The tensors are created on the device of the first loss that is scaled.

    Attributes:
        key: the key it has in its scaler; None for the scale of losses without a key.
        schedule: how it moves.
        scale: 0-dim float32, or None before the first loss.
        growth_tracker: 0-dim int32: finite steps in a row.
        hysteresis_left: 0-dim int32: overflows left before the scale drops.
        losses: how many tensors were multiplied by it, except in graphs.
        optimizer_states: per-optimizer state since the last update.
        at_floor: whether the last skipped step was one at the floor.
    """

    def __init__(self, init_scale: float, schedule: LossScaleSchedule, key: str | None = None) -> None:
        self.key = key
        self.schedule = schedule
        within = max(valid_scale(init_scale, "init_scale="), schedule.min_scale)
        self.init_scale = min(within, schedule.max_scale)
        self.init_growth_tracker = 0
        self.init_hysteresis_left = as_int32(schedule.hysteresis)
        self.scale: Tensor | None = None
        self.growth_tracker: Tensor | None = None
        self.hysteresis_left: Tensor | None = None
        self.losses = 0
        self.optimizer_states = OptimizerStates()
        self.at_floor = False

    def allocate(self, device: torch.device) -> None:
        """Create the tensors on `device`."""
        if self.growth_tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        scale = torch.full((), self.init_scale, dtype=torch.float32, device=device)
        tracker = torch.full((), self.init_growth_tracker, dtype=torch.int32, device=device)
        left = self._new_hysteresis_left(device)
        # Other threads look for `scale`: it comes last.
        self.growth_tracker, self.hysteresis_left, self.scale = tracker, left, scale

    def _new_hysteresis_left(self, device: torch.device) -> Tensor:
        return torch.full((), self.init_hysteresis_left, dtype=torch.int32, device=device)

    def _allocate_once(self, device: torch.device) -> Tensor:
        """Create the tensors in one of the threads that scale the first losses, as pipeline stages do."""
        if is_tracing():
            self.allocate(device)
        else:
            with _allocating:
                if self.scale is None:
                    self.allocate(device)
        return self.check("scale")

    def multiply(self, tensor: Tensor) -> Tensor:
        """Return `tensor` times the scale; float16 is widened to float32, so that it does not overflow."""
        scale = self._allocate_once(tensor.device) if self.scale is None else self.scale
        if not is_tracing():  # a count would recompile the graph at every step
            self.losses += 1
        wide = tensor.float() if tensor.dtype is torch.float16 else tensor
        return wide * (scale if scale.device == tensor.device else moved(scale, tensor.device))

    def check(self, call: str) -> Tensor:
        """Return the scale.

        Raises:
            AssertionError: no loss was scaled yet; torch's text.
        """
        if self.scale is None:  # no assert statement: `python -O` leaves those out
            whose = "" if self.key is None else f" No loss was scaled under the key {self.key!r}."
            raise AssertionError(f"Attempted {call} but _scale is None.  {_NO_SCALE}{whose}")
        if self.growth_tracker is None:
            raise AssertionError(f"Attempted {call} but _growth_tracker is None.  {_NO_SCALE}")
        return self.scale

    # -- moving ----------------------------------------------------------------------------------

    def has_flags(self) -> bool:
        """Whether gradients were checked since the last update."""
        return bool(self.optimizer_states.found_infs())

    def advance(self) -> None:
        """Move the scale as the schedule says.

        Raises:
            AssertionError: no gradients were checked since the last update; torch's text.
        """
        scale, tracker = self.check("update"), self.growth_tracker
        assert tracker is not None  # or `check` has raised
        flags = self.optimizer_states.found_infs()
        if not flags:  # no assert statement: Dynamo would make an operation of it
            raise AssertionError(_NO_CHECKS)
        found_inf = combine(flags, scale.device)
        if self.hysteresis_left is None:  # code written for torch has set the other two
            self.hysteresis_left = self._new_hysteresis_left(scale.device)
        left = self.hysteresis_left
        if on_host(found_inf, scale, tracker, left):
            _advance_on_host(found_inf, scale, tracker, left, self.schedule)
        else:
            state = ScaleTensors(scale, tracker, left)
            kernels_of(scale.device).update_scale_(state, found_inf, self.schedule)
        self.optimizer_states = OptimizerStates()

    def set(self, new_scale: float | Tensor, device_type: str) -> None:
        """Set the scale; see `GradScaler.update`."""
        scale = self.check("update")
        if isinstance(new_scale, Tensor):
            right = (new_scale.device.type, new_scale.numel(), new_scale.requires_grad)
            if right != (device_type, 1, False):
                raise AssertionError(
                    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
                    "torch.FloatTensor with requires_grad=False."
                )
            if new_scale.dim():
                raise RuntimeError(_WITH_DIMENSIONS.format(shape=[*new_scale.shape]))
            value = new_scale.detach()
            if on_host(value):
                valid_scale(read(value), "new_scale=")
            value = value.to(torch.float32)
            fits = (value > 0) & value.isfinite()
            scale.copy_(torch.where(fits, value, scale))
        else:
            scale.fill_(valid_scale(new_scale, "new_scale="))
        self.optimizer_states = OptimizerStates()

    def stop(self) -> None:
        """Set the scale to 1 for good."""
        self.schedule = replace(self.schedule, min_scale=1.0, max_scale=1.0, at_floor=AtFloor.WARN)
        self.check("update").fill_(1.0)

    # -- reading ---------------------------------------------------------------------------------

    def value(self) -> float:
        """Return the scale; waits for the device."""
        return self.init_scale if self.scale is None else float(self.scale.item())

    def state(self) -> ScaleState:
        """Return the scale and both counts; waits for the device."""
        tracker, left = self.growth_tracker, self.hysteresis_left
        return ScaleState(
            self.value(),
            self.init_growth_tracker if tracker is None else int(tracker.item()),
            self.init_hysteresis_left if left is None else int(left.item()),
        )

    # -- saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `saved_form`."""
        return saved_form(self.state(), self.schedule)

    def load(self, saved: SavedScale) -> None:
        """Take over what was saved."""
        self.schedule = saved.schedule
        self.init_scale, self.init_growth_tracker, self.init_hysteresis_left = saved.state
        tensors = (self.scale, self.growth_tracker, self.hysteresis_left)
        for tensor, value in zip(tensors, saved.state, strict=True):
            if tensor is not None:
                tensor.fill_(value)

    def rehearsing(self) -> LossScale:
        """Return a scale of the same value that moves by itself, for other gradients."""
        copied, states = object.__new__(type(self)), OptimizerStates()
        states.fresh = self.optimizer_states.fresh
        for name, value in vars(self).items():
            setattr(copied, name, value.clone() if isinstance(value, Tensor) else value)
        copied.optimizer_states = states
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self.optimizer_states or self.optimizer_states.orphans:
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        state = self.state()
        return {
            **self.__dict__,
            "init_scale": state.scale,
            "init_growth_tracker": state.growth_tracker,
            "init_hysteresis_left": state.hysteresis_left,
            "scale": None,
            "growth_tracker": None,
            "hysteresis_left": None,
            "optimizer_states": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.optimizer_states = OptimizerStates()


def _advance_on_host(
    found_inf: Tensor, scale: Tensor, tracker: Tensor, left: Tensor, schedule: LossScaleSchedule
) -> None:
    overflow, steps, hysteresis_left = read(found_inf) > 0.0, read(tracker), read(left)
    if not overflow and steps + 1 < schedule.growth_interval and hysteresis_left == schedule.hysteresis:
        tracker.fill_(steps + 1)  # the usual case of `next_scale`
        return
    before = ScaleState(read(scale), steps, hysteresis_left)
    after = next_scale(before, overflow, schedule)
    tracker.fill_(after.growth_tracker)
    if after.scale != before.scale:
        scale.fill_(after.scale)
    if after.hysteresis_left != before.hysteresis_left:
        left.fill_(as_int32(after.hysteresis_left))


def check_saved(state: object, schedule: LossScaleSchedule) -> SavedScale:
    """Check a saved state whole, before anything is loaded from it.

    Args:
        state: the result of `LossScale.state_dict`, or torch's.
        schedule: supplies the fields that `state` leaves out.

    Raises:
        TypeError: `state` is not a mapping, or an entry has the wrong type.
        KeyError: an entry is missing.
        ValueError: an entry is out of range.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"The state of a GradScaler must be a mapping, got {type(state).__name__}.")
    for name in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"):
        if name not in state:
            raise KeyError(f"The state of a GradScaler has no entry {name!r}.")
    schedule = replace(
        schedule,
        growth_factor=state["growth_factor"],
        backoff_factor=state["backoff_factor"],
        growth_interval=state["growth_interval"],
        **known_fields(state.get("_schedule", {})),
    )
    tracker = whole_number("_growth_tracker", state["_growth_tracker"])
    left = whole_number("_hysteresis_left", state.get("_hysteresis_left", as_int32(schedule.hysteresis)))
    return SavedScale(schedule, ScaleState(valid_scale(state["scale"], "The saved scale"), tracker, left))


def whole_number(name: str, value: Any, least: int = 0) -> int:
    """Return a saved number of steps, which a tensor will hold.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it is below `least`, or int32 cannot hold it.
    """
    count = whole(name, value)
    if not least <= count < 2**31:
        raise ValueError(f"{name} must be a number of steps that int32 can hold, got {value!r}.")
    return count


def whole(name: str, value: Any) -> int:
    """Return a saved whole number.

    Raises:
        TypeError: it is none.
    """
    try:
        count = int(value)
        is_whole = bool(count == value)  # not of the text "3", nor of 1.5
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TypeError(f"{name} must be a whole number, got {value!r}.") from error
    if not is_whole:
        raise TypeError(f"{name} must be a whole number, got {value!r}.")
    return count
