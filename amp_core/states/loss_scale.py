"""The state machines of amp-core, as pure functions: (state, event) -> state.

Nothing here holds a tensor or touches a device. `GradScaler` and every backend's device-side
kernels must agree with these functions bit for bit.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any


class Hysteresis(str, enum.Enum):
    """When an overflow lowers the scale, given a count ``h``: three systems, three meanings."""

    BUDGET = "budget"
    """Megatron, DeepSpeed: ``h - 1`` overflows are forgiven; the budget is refilled when the scale grows."""

    CONSECUTIVE = "consecutive"
    """DeepSpeed ``consecutive_hysteresis``, apex: as `BUDGET`, but any finite step refills it."""

    EVERY = "every"
    """Paddle: the scale is lowered once per ``h`` consecutive overflows."""


class AtFloor(str, enum.Enum):
    """What happens when gradients overflow though the scale is at its floor."""

    WARN = "warn"
    """Warn, once for each time that the floor is reached."""

    RAISE = "raise"
    """Raise `ScaleFloorError` from `GradScaler.update`, as DeepSpeed does."""

    STOP = "stop"
    """Warn, and stop scaling: the scale is 1 from then on; steps are still checked and skipped."""


@dataclass(frozen=True)
class LossScaleSchedule:
    """How the loss scale moves. The defaults are torch's.

    Attributes:
        growth_factor: what the scale is multiplied by after `growth_interval` finite steps in a row.
        backoff_factor: what it is multiplied by at an overflow.
        growth_interval: number of finite steps in a row before it grows.
        min_scale: it is never lowered below this; by default the smallest scale whose reciprocal is
            a finite float32 (torch has no floor: its scale reaches 0 and then ruins the parameters).
        max_scale: it is never raised above this.
        hysteresis: number of overflows that it takes to lower it; see `Hysteresis`.
        hysteresis_kind: what that number means.
        at_floor: what happens when gradients overflow at `min_scale`; see `AtFloor`. With another
            value than `AtFloor.WARN`, `GradScaler.update` waits for the device once.
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-126
    max_scale: float = math.inf
    hysteresis: int = 1
    hysteresis_kind: Hysteresis = Hysteresis.BUDGET
    at_floor: AtFloor = AtFloor.WARN

    @classmethod
    def constant(cls, scale: float) -> LossScaleSchedule:
        """Return the schedule of a scale that never moves: its floor and ceiling are `scale`."""
        return cls(min_scale=scale, max_scale=scale)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hysteresis_kind", Hysteresis(self.hysteresis_kind))
        object.__setattr__(self, "at_floor", AtFloor(self.at_floor))
        _check(self.growth_factor > 1.0, "The growth factor must be > 1.0.", AssertionError)
        _check(self.backoff_factor < 1.0, "The backoff factor must be < 1.0.", AssertionError)
        _check(math.isfinite(self.growth_factor), f"The growth factor {self.growth_factor} is not finite.")
        _check(self.backoff_factor > 0.0, f"The backoff factor must be > 0, got {self.backoff_factor}.")
        _check(
            isinstance(self.growth_interval, int) and self.growth_interval > 0,
            f"The growth interval must be a positive number of steps, got {self.growth_interval!r}.",
        )
        _check(
            0.0 < self.min_scale <= self.max_scale,
            f"The floor of the scale must be > 0 and not above its ceiling, "
            f"got min_scale={self.min_scale}, max_scale={self.max_scale}.",
        )
        _check(
            isinstance(self.hysteresis, int) and self.hysteresis > 0,
            f"The hysteresis must be a positive number of overflows, got {self.hysteresis!r}.",
        )


def further_fields(schedule: LossScaleSchedule) -> dict[str, Any]:
    """Return, as plain values, what `schedule` has beyond torch's three and not as by default."""
    return {
        field.name: value.value if isinstance(value := getattr(schedule, field.name), enum.Enum) else value
        for field in fields(schedule)[3:]
        if getattr(schedule, field.name) != field.default
    }


def known_fields(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `saved`, which `further_fields` gave.

    Raises:
        ValueError: it names a field that a `LossScaleSchedule` does not have.
    """
    unknown = saved.keys() - {field.name for field in fields(LossScaleSchedule)}
    _check(
        not unknown,
        f"The saved schedule has {', '.join(sorted(unknown))}, which this version of amp-core does not know. "
        f"A later version may have saved it.",
    )
    return saved


def _check(holds: bool, text: str, error: type[Exception] = ValueError) -> None:
    if not holds:
        raise error(text)


@dataclass(frozen=True)
class ScaleState:
    """The loss scale (a float32 value), its finite steps in a row, and the overflows still forgiven."""

    scale: float
    growth_tracker: int = 0
    hysteresis_left: int = 1


def next_scale(state: ScaleState, found_inf: bool, schedule: LossScaleSchedule) -> ScaleState:
    """Return the state after one `GradScaler.update`.

    The product is taken in float64 and rounded to float32, and growth that would leave float32 is
    refused, as in torch's ``_amp_update_scale_``.
    """
    if found_inf:
        return _overflow(state, schedule)
    left = state.hysteresis_left
    if schedule.hysteresis_kind is not Hysteresis.BUDGET:
        left = schedule.hysteresis
    if state.growth_tracker + 1 < schedule.growth_interval:
        return replace(state, growth_tracker=state.growth_tracker + 1, hysteresis_left=left)
    grown = float32(state.scale * schedule.growth_factor)
    scale = state.scale if math.isinf(grown) else max(state.scale, min(grown, schedule.max_scale))
    return ScaleState(scale, 0, schedule.hysteresis)


def _overflow(state: ScaleState, schedule: LossScaleSchedule) -> ScaleState:
    left = state.hysteresis_left - 1
    if left > 0:
        return replace(state, growth_tracker=0, hysteresis_left=left)
    lowered = float32(state.scale * schedule.backoff_factor)
    scale = min(state.scale, max(lowered, schedule.min_scale))
    every = schedule.hysteresis_kind is Hysteresis.EVERY
    return ScaleState(scale, 0, schedule.hysteresis if every else max(left, 0))


def float32(value: float) -> float:
    """Round to the nearest float32; beyond its range, to infinity."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


class OptState(enum.Enum):
    """The stage of one optimizer between two calls of `GradScaler.update`."""

    READY = 0
    UNSCALED = 1
    STEPPED = 2


_STAGES: dict[tuple[OptState, str], OptState | str] = {
    (OptState.READY, "unscale_"): OptState.UNSCALED,
    (OptState.READY, "step"): OptState.STEPPED,
    (OptState.UNSCALED, "unscale_"): (
        "unscale_() has already been called on this optimizer since the last update()."
    ),
    (OptState.UNSCALED, "step"): OptState.STEPPED,
    (OptState.STEPPED, "unscale_"): "unscale_() is being called after step().",
    (OptState.STEPPED, "step"): "step() has already been called since the last update().",
}
"""(stage, call) -> next stage, or the text of torch's error. ``update`` leads back to READY from any."""


def next_stage(stage: OptState, call: str) -> OptState:
    """Return the stage after `call` (``"unscale_"`` or ``"step"``).

    Raises:
        RuntimeError: the call is not allowed in this stage; with torch's text.
    """
    outcome = _STAGES[stage, call]
    if isinstance(outcome, str):
        raise RuntimeError(outcome)
    return outcome
