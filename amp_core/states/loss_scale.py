"""The state machine of the loss scale, as pure functions: (state, event) -> state.

Nothing here holds a tensor or touches a device. `GradScaler` and the device kernels of every backend must
agree with these functions bit for bit.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, NamedTuple

from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_core.common.arguments import is_no_real

__all__ = [
    "AtFloor",
    "Hysteresis",
    "LossScaleSchedule",
    "OptState",
    "ScaleState",
    "float32",
    "further_fields",
    "known_fields",
    "next_scale",
    "next_stage",
    "saved_form",
    "valid_scale",
]


class Hysteresis(str, enum.Enum):
    """When an overflow lowers the scale, given a count ``h``. Each value follows another system.

    Example::

        schedule = LossScaleSchedule(hysteresis=2, hysteresis_kind=Hysteresis.CONSECUTIVE)
    """

    BUDGET = "budget"
    """Megatron, DeepSpeed: ignore ``h - 1`` overflows, then lower. Growth restores the budget."""

    CONSECUTIVE = "consecutive"
    """DeepSpeed ``consecutive_hysteresis``, apex: as `BUDGET`, but any finite step restores it."""

    EVERY = "every"
    """Paddle: lower the scale once per ``h`` consecutive overflows."""


class AtFloor(str, enum.Enum):
    """What `GradScaler.update` does when gradients overflow while the scale is at its floor.

    Example::

        schedule = LossScaleSchedule(min_scale=1.0, at_floor=AtFloor.RAISE)
    """

    WARN = "warn"
    """Warn at the first overflow at the floor, once until the scale has grown again."""

    RAISE = "raise"
    """Raise `ScaleFloorError`, as DeepSpeed does."""

    STOP = "stop"
    """Warn and set the scale to 1 for good. Steps are still checked and skipped."""


@dataclass(frozen=True)
class LossScaleSchedule:
    """How the loss scale moves. The defaults are torch's.

    Attributes:
        growth_factor: multiplies the scale after `growth_interval` finite steps in a row; above 1.
        backoff_factor: multiplies the scale after an overflow; between 0 and 1.
        growth_interval: number of finite steps in a row before the scale grows.
        min_scale: the floor of the scale. The default is the smallest scale whose reciprocal is a finite
            float32. (torch has no floor: its scale can reach 0, and the next step then writes NaN.)
        max_scale: the ceiling of the scale.
        hysteresis: number of overflows it takes to lower the scale; see `Hysteresis`.
        hysteresis_kind: how overflows are counted.
        at_floor: what happens when gradients overflow at `min_scale`. With any value but `AtFloor.WARN`,
            each `GradScaler.update` waits for the device.

    Raises:
        AssertionError: `growth_factor` is not above 1, or `backoff_factor` not below 1; torch's texts.
        ValueError: any other field is out of range or of the wrong type, or `min_scale` is not a float32
            above 0.
        TypeError: a factor, `min_scale` or `max_scale` is no number.

    Example::

        schedule = LossScaleSchedule(min_scale=1.0, max_scale=2.0**24, hysteresis=2)
        scaler = GradScaler("cpu", schedule=schedule)
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
        """Return a schedule that keeps the scale at `scale`.

        Raises:
            ValueError: `scale` is not a positive, finite float32.
            TypeError: it is no number.
        """
        scale = valid_scale(scale)
        return cls(min_scale=scale, max_scale=scale)

    def __post_init__(self) -> None:
        for name in ("growth_factor", "backoff_factor", "min_scale", "max_scale"):
            value = _number_in(getattr(self, name))
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            _check(is_number, f"{name} must be a number, got {value!r}.", TypeError)
            object.__setattr__(self, name, _as_float(value))  # checkpoints shall not hold numbers of NumPy
        for name, what in (
            ("growth_interval", "growth interval must be a positive number of steps"),
            ("hysteresis", "hysteresis must be a positive number of overflows"),
        ):
            value = _number_in(getattr(self, name))
            is_count = isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0
            _check(is_count, f"The {what}, got {value!r}.")
            object.__setattr__(self, name, int(value))
        for name, kind in (("hysteresis_kind", Hysteresis), ("at_floor", AtFloor)):
            value, values = getattr(self, name), [member.value for member in kind]
            _check(value in values, f"{name} must be one of {', '.join(values)}, got {value!r}.")
            object.__setattr__(self, name, kind(value))
        _check(self.growth_factor > 1.0, "The growth factor must be > 1.0.", AssertionError)
        _check(self.backoff_factor < 1.0, "The backoff factor must be < 1.0.", AssertionError)
        _check(math.isfinite(self.growth_factor), f"The growth factor {self.growth_factor} is not finite.")
        _check(self.backoff_factor > 0.0, f"The backoff factor must be > 0, got {self.backoff_factor}.")
        _check(
            0.0 < self.min_scale <= self.max_scale,
            f"The floor of the scale must be > 0 and not above its ceiling, "
            f"got min_scale={self.min_scale}, max_scale={self.max_scale}.",
        )
        object.__setattr__(self, "min_scale", valid_scale(self.min_scale))


def _number_in(value: Any) -> Any:
    """Return the number in a tensor without dimensions, which torch takes for one."""
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


_OF_TORCH = 3
"""The first fields of `LossScaleSchedule`, which torch has too."""


def further_fields(schedule: LossScaleSchedule) -> dict[str, Any]:
    """Return the fields of `schedule` that torch does not have; none if all have their defaults.

    A schedule that is stopped thus has the same entries as before: ``torch.distributed.checkpoint`` loads
    into the entries that it finds.
    """
    further = fields(schedule)[_OF_TORCH:]
    values = {field.name: getattr(schedule, field.name) for field in further}
    if all(values[field.name] == field.default for field in further):
        return {}
    return {name: value.value if isinstance(value, enum.Enum) else value for name, value in values.items()}


def known_fields(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `saved` if it can be the result of `further_fields`.

    Raises:
        ValueError: it is not a mapping, or it has a field that is none of `LossScaleSchedule`'s own.
    """
    _check(isinstance(saved, Mapping), f"The saved schedule must be a mapping, got {saved!r}.")
    unknown = saved.keys() - {field.name for field in fields(LossScaleSchedule)[_OF_TORCH:]}
    _check(
        not unknown,
        f"The saved schedule has {', '.join(sorted(unknown))}, which this version of amp-core does not know. "
        f"A later version may have saved it.",
    )
    return saved


def _check(holds: bool, text: str, error: type[Exception] = ValueError) -> None:
    if not holds:
        raise error(text)


class ScaleState(NamedTuple):
    """The loss scale (a float32 value), its finite steps in a row, and the overflows left before it drops."""

    scale: float
    growth_tracker: int = 0
    hysteresis_left: int = 1


def saved_form(state: ScaleState, schedule: LossScaleSchedule) -> dict[str, Any]:
    """Return a scale and its schedule in torch's format, with entries of our own for what torch lacks."""
    saved = {
        "scale": state.scale,
        "growth_factor": schedule.growth_factor,
        "backoff_factor": schedule.backoff_factor,
        "growth_interval": schedule.growth_interval,
        "_growth_tracker": state.growth_tracker,
    }
    if schedule.hysteresis > 1:
        saved["_hysteresis_left"] = state.hysteresis_left
    further = further_fields(schedule)
    return {**saved, "_schedule": further} if further else saved


def next_scale(state: ScaleState, found_inf: bool, schedule: LossScaleSchedule) -> ScaleState:
    """Return the state after one `GradScaler.update`.

    As in torch's ``_amp_update_scale_``, the product is computed in float64 and rounded to float32, and
    the scale does not grow beyond float32.

    Args:
        state: the state before the update.
        found_inf: whether a step was skipped because a gradient was not finite.
        schedule: the rule.

    Returns:
        The new state.
    """
    if found_inf:
        return _overflow(state, schedule)
    left = state.hysteresis_left
    if schedule.hysteresis_kind is not Hysteresis.BUDGET:
        left = schedule.hysteresis
    if state.growth_tracker + 1 < schedule.growth_interval:
        return ScaleState(state.scale, state.growth_tracker + 1, left)
    grown = float32(state.scale * schedule.growth_factor)
    scale = state.scale if math.isinf(grown) else max(state.scale, float32(min(grown, schedule.max_scale)))
    return ScaleState(scale, 0, schedule.hysteresis)


def _overflow(state: ScaleState, schedule: LossScaleSchedule) -> ScaleState:
    left = state.hysteresis_left - 1
    if left > 0:
        return ScaleState(state.scale, 0, left)
    lowered = float32(max(state.scale * schedule.backoff_factor, schedule.min_scale))
    scale = min(state.scale, lowered)
    every = schedule.hysteresis_kind is Hysteresis.EVERY
    return ScaleState(scale, 0, schedule.hysteresis if every else max(left, 0))


def valid_scale(value: Any, name: str = "The scale") -> float:
    """Return `value` as a float if it can be a loss scale; `name` says whose it is.

    What float32 rounds down to its largest number becomes that one: torch refuses to fill a tensor with more.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not positive and finite, or float32 rounds it to 0 or inf.
    """
    is_number = not isinstance(value, (str, bytes)) and not is_no_real(value)
    _check(is_number, f"{name} must be a number, got {value!r}.", TypeError)
    try:
        number = _as_float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several elements
        raise TypeError(f"{name} must be a number, got {value!r}.") from error
    if not (math.isfinite(number) and number > 0.0):
        raise ValueError(f"{name} must be positive and finite, got {value!r}.")
    if not 0.0 < float32(number) < math.inf:
        raise ValueError(
            f"{name} must be positive and finite in float32, got {value!r}, which float32 rounds to "
            f"{float32(number)}. Pass a value between 2**-149 and 3.4e38."
        )
    return min(number, _LARGEST)


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


_LARGEST = (2.0 - 2.0**-23) * 2.0**127


def float32(value: float) -> float:
    """Round to the nearest float32; values beyond its range become infinite."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


_REFUSED = {
    (OptState.UNSCALED, "unscale_"): (
        "unscale_() has already been called on this optimizer since the last update()."
    ),
    (OptState.STEPPED, "unscale_"): "unscale_() is being called after step().",
    (OptState.STEPPED, "step"): "step() has already been called since the last update().",
}
"""(stage, call) -> torch's error text, for the calls that are not allowed."""


def next_stage(stage: OptState, call: str) -> OptState:
    """Return the stage after `call` (``"unscale_"`` or ``"step"``). ``update`` resets every stage to READY.

    Raises:
        RuntimeError: the call is not allowed in this stage; with torch's text.
    """
    if stage is OptState.READY or (stage is OptState.UNSCALED and call == "step"):
        return OptState.STEPPED if call == "step" else OptState.UNSCALED
    raise RuntimeError(_REFUSED[stage, call])
