"""The state machines of amp-core, as pure functions: (state, event) -> state.

Nothing here holds a tensor or touches a device. `GradScaler` and every backend's device-side
kernels must agree with these functions bit for bit.
"""

from __future__ import annotations

import enum
import math
import struct
from dataclasses import dataclass, replace


class Hysteresis(str, enum.Enum):
    """When an overflow lowers the scale, given a count ``h``: three systems, three meanings."""

    BUDGET = "budget"
    """Megatron, DeepSpeed: ``h - 1`` overflows are forgiven; the budget is refilled when the scale grows."""

    CONSECUTIVE = "consecutive"
    """DeepSpeed ``consecutive_hysteresis``, apex: as `BUDGET`, but any finite step refills it."""

    EVERY = "every"
    """Paddle: the scale is lowered once per ``h`` consecutive overflows."""


@dataclass(frozen=True)
class Schedule:
    """How the loss scale moves. The defaults are torch's.

    Attributes:
        growth_factor: what the scale is multiplied by after `growth_interval` finite steps in a row.
        backoff_factor: what it is multiplied by at an overflow.
        growth_interval: number of finite steps in a row before it grows.
        min_scale: it is never lowered below this.
        max_scale: it is never raised above this.
        hysteresis: number of overflows that it takes to lower it; see `Hysteresis`.
        hysteresis_kind: what that number means.
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 0.0
    max_scale: float = math.inf
    hysteresis: int = 1
    hysteresis_kind: Hysteresis = Hysteresis.BUDGET


@dataclass(frozen=True)
class ScaleState:
    """The loss scale (a float32 value), its finite steps in a row, and the overflows still forgiven."""

    scale: float
    growth_tracker: int = 0
    hysteresis_left: int = 1


def next_scale(state: ScaleState, found_inf: bool, schedule: Schedule) -> ScaleState:
    """Return the state after one `GradScaler.update`.

    The product is taken in float32; growth that would leave float32 or pass ``max_scale`` is
    refused or capped, as in torch's ``_amp_update_scale_``.
    """
    if found_inf:
        return _overflow(state, schedule)
    left = state.hysteresis_left
    if schedule.hysteresis_kind is not Hysteresis.BUDGET:
        left = schedule.hysteresis
    if state.growth_tracker + 1 < schedule.growth_interval:
        return replace(state, growth_tracker=state.growth_tracker + 1, hysteresis_left=left)
    grown = float32(state.scale * float32(schedule.growth_factor))
    scale = state.scale if math.isinf(grown) else max(state.scale, min(grown, schedule.max_scale))
    return ScaleState(scale, 0, schedule.hysteresis)


def _overflow(state: ScaleState, schedule: Schedule) -> ScaleState:
    left = state.hysteresis_left - 1
    if left > 0:
        return replace(state, growth_tracker=0, hysteresis_left=left)
    lowered = float32(state.scale * float32(schedule.backoff_factor))
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
