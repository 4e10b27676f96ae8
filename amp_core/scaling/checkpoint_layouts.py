"""How other systems keep the state of a loss scaler.

Formats and rules: torch ``torch/amp/grad_scaler.py``, Megatron-LM ``core/optimizer/grad_scaler.py``,
DeepSpeed ``runtime/fp16/loss_scaler.py`` and ``fused_optimizer.py``, apex ``amp/frontend.py`` and
``amp/scaler.py``, Paddle ``amp/grad_scaler.py`` and ``phi/kernels/impl/amp_kernel_impl.h``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from amp_core.kernels.interface import as_int32
from amp_core.scaling.loss_scale import whole, whole_number
from amp_core.states.loss_scale import (
    AtFloor,
    Hysteresis,
    LossScaleSchedule,
    ScaleState,
    known_fields,
    saved_form,
    valid_scale,
)

_Scales = dict[str | None, tuple[ScaleState, LossScaleSchedule]]
"""Key -> where its scale is and how it moves; ``None`` is the key of the scaler's own."""


@dataclass(frozen=True)
class System:
    """How one system keeps its state, and what it has no place for.

    Attributes:
        known: whether a state looks like its own.
        read: state and schedule (None: as the state says, else the system's defaults) -> scales.
        write: scales -> state.
        limits: a field of a schedule -> the values that it can have besides our default; others are free.
        kinds: how it counts overflows, if it does.
        one_factor: whether the scale falls by the factor by which it grows.
        has_constants: whether it can say that the scale does not move, so that nothing else matters.
    """

    known: Callable[[Any], bool]
    read: Callable[[Any, LossScaleSchedule | None], _Scales]
    write: Callable[[_Scales], Any]
    limits: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    kinds: tuple[Hysteresis, ...] = tuple(Hysteresis)
    one_factor: bool = False
    has_constants: bool = False

    def cannot(self, rule: LossScaleSchedule) -> list[str]:
        """Return what of a schedule it has no place for."""
        if self.has_constants and rule.min_scale == rule.max_scale:
            return []
        default, lost = LossScaleSchedule(), []
        for name, others in self.limits.items():
            value = getattr(rule, name)
            if value not in (getattr(default, name), *others):
                lost.append(f"{name}={value.value if isinstance(value, Enum) else value}")
        if rule.hysteresis > 1 and rule.hysteresis_kind not in self.kinds:
            lost.append(f"hysteresis={rule.hysteresis} as {rule.hysteresis_kind.value}")
        if self.one_factor and not math.isclose(rule.growth_factor * rule.backoff_factor, 1.0):
            lost.append(f"backoff_factor={rule.backoff_factor}")
        return lost


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda state: isinstance(state, Mapping) and all(name in state for name in names)


def _entry(state: Any, name: str) -> Any:
    if not isinstance(state, Mapping):
        raise TypeError(f"The state of a loss scaler must be a mapping, got {state!r}.")
    if name not in state:
        raise KeyError(f"The state has no entry {name!r}, only {', '.join(map(repr, state))}.")
    return state[name]


def _count(state: Any, name: str, least: int = 0) -> int:
    return whole_number(name, _entry(state, name), least)


def _interval(state: Any, name: str) -> int:
    return whole(name, _entry(state, name))  # a schedule checks the rest; with 10**10 the scale never grows


def _scale(state: Any, name: str) -> float:
    """Take the scale out of a list, tensor or array of one element too."""
    value = _entry(state, name)
    one = (isinstance(value, list) and len(value) == 1) or getattr(value, "shape", None) == (1,)
    return valid_scale(value[0] if one else value)


def _flag(state: Any, name: str) -> bool:
    value = _entry(state, name)
    if not isinstance(value, (bool, int)):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return bool(value)


def _factor(state: Any, name: str) -> float:
    return valid_scale(_entry(state, name), name)


# -- torch and amp_core ------------------------------------------------------------------------------


def _read_torch(state: Any, schedule: LossScaleSchedule | None) -> _Scales:
    rule = schedule or LossScaleSchedule(
        _factor(state, "growth_factor"),
        _factor(state, "backoff_factor"),
        _interval(state, "growth_interval"),
        **known_fields(state.get("_schedule", {})),
    )
    left = whole_number("_hysteresis_left", state.get("_hysteresis_left", as_int32(rule.hysteresis)))
    at = ScaleState(_scale(state, "scale"), _count(state, "_growth_tracker"), left)
    scales: _Scales = {None: (at, rule)}
    keys = state.get("_keys", {})
    if not isinstance(keys, Mapping):
        raise TypeError(f'"_keys" must be a mapping, got {keys!r}.')
    for key, keyed in keys.items():
        scales[key] = _read_torch(keyed, schedule)[None]
    return scales


def _write_torch(scales: _Scales) -> dict[str, Any]:
    at, rule = scales[None]
    return saved_form(at, LossScaleSchedule(rule.growth_factor, rule.backoff_factor, rule.growth_interval))


def _write_own(scales: _Scales) -> dict[str, Any]:
    keyed = {key: saved_form(*held) for key, held in scales.items() if key is not None}
    return {**saved_form(*scales[None]), **({"_keys": keyed} if keyed else {})}


# -- DeepSpeed ---------------------------------------------------------------------------------------


def _deepspeed_attributes(state: Any) -> Any:
    held = state.get("loss_scaler", state) if isinstance(state, Mapping) else state
    return held if isinstance(held, Mapping) else vars(held) if hasattr(held, "cur_scale") else {}


def _read_deepspeed(state: Any, schedule: LossScaleSchedule | None) -> _Scales:
    held = _deepspeed_attributes(state)
    scale = _scale(held, "cur_scale")
    if not _flag({"dynamic": held.get("dynamic_loss_scale", True), **held}, "dynamic"):
        return {None: (ScaleState(scale), schedule or LossScaleSchedule.constant(scale))}
    rule = schedule or _deepspeed_rule(held)
    # `cur_iter` counts the next step, and growth asks for a whole number of windows since the overflow.
    since = _count(held, "cur_iter") - _count(held, "last_overflow_iter", least=-1)  # -1: none so far
    tracker = (since - 1) % rule.growth_interval
    left = whole_number("cur_hysteresis", held.get("cur_hysteresis", as_int32(rule.hysteresis)))
    return {None: (ScaleState(scale, tracker, left), rule)}


def _deepspeed_rule(held: Mapping[str, Any]) -> LossScaleSchedule:
    consecutive = _flag({"consecutive_hysteresis": False, **held}, "consecutive_hysteresis")
    raises = _flag({"raise_error_at_min_scale": False, **held}, "raise_error_at_min_scale")
    return LossScaleSchedule(
        growth_factor=_factor(held, "scale_factor"),
        backoff_factor=1.0 / _factor(held, "scale_factor"),
        growth_interval=_interval(held, "scale_window"),
        min_scale=_factor({"min_scale": 1.0, **held}, "min_scale"),
        hysteresis=_count({"delayed_shift": 1, **held}, "delayed_shift"),
        hysteresis_kind=Hysteresis.CONSECUTIVE if consecutive else Hysteresis.BUDGET,
        at_floor=AtFloor.RAISE if raises else AtFloor.WARN,
    )


def _write_deepspeed(scales: _Scales) -> dict[str, Any]:
    at, rule = scales[None]
    if rule.min_scale == rule.max_scale:
        return {"cur_scale": at.scale, "dynamic": False}
    return {
        "cur_scale": at.scale,
        "dynamic": True,
        "cur_iter": at.growth_tracker,
        "last_overflow_iter": -1,
        "scale_factor": rule.growth_factor,
        "scale_window": rule.growth_interval,
        "min_scale": rule.min_scale,
        "delayed_shift": rule.hysteresis,
        "cur_hysteresis": max(at.hysteresis_left, 1),  # it lowers the scale at 1, we at 1 and 0
        "consecutive_hysteresis": rule.hysteresis_kind is Hysteresis.CONSECUTIVE,
        "raise_error_at_min_scale": rule.at_floor is AtFloor.RAISE,
    }


# -- Megatron ----------------------------------------------------------------------------------------

MEGATRON = LossScaleSchedule(2.0, 0.5, growth_interval=1000, min_scale=1.0, hysteresis=2)
"""The defaults of its ``--loss-scale-window``, ``--min-loss-scale`` and ``--hysteresis``."""


def _megatron_entries(state: Any) -> Any:
    return state.get("grad_scaler", state) if isinstance(state, Mapping) else state


def _read_megatron(state: Any, schedule: LossScaleSchedule | None) -> _Scales:
    held = _megatron_entries(state)
    left = max(_count(held, "hysteresis_tracker", least=-(2**31)), 0)
    at = ScaleState(_scale(held, "scale"), _count(held, "growth_tracker"), left)
    return {None: (at, schedule or MEGATRON)}


def _write_megatron(scales: _Scales) -> dict[str, Any]:
    at, _ = scales[None]
    return {
        "scale": torch.tensor([at.scale], dtype=torch.float32),
        "growth_tracker": at.growth_tracker,
        "hysteresis_tracker": at.hysteresis_left,
    }


# -- apex --------------------------------------------------------------------------------------------

APEX = LossScaleSchedule(2.0, 0.5, growth_interval=2000, max_scale=2.0**24)
"""The defaults of ``apex.amp.initialize``; its hysteresis exists as a kernel alone."""


def _read_apex(state: Any, schedule: LossScaleSchedule | None) -> _Scales:
    rule = schedule or APEX
    _entry(state, "loss_scaler0")
    scales: _Scales = {}
    for name, held in state.items():
        number = str(name).removeprefix("loss_scaler")
        at = ScaleState(_scale(held, "loss_scale"), _count(held, "unskipped"), rule.hysteresis)
        scales[None if number == "0" else number] = (at, rule)
    return scales


def _write_apex(scales: _Scales) -> dict[str, Any]:
    return {
        f"loss_scaler{number}": {"loss_scale": at.scale, "unskipped": at.growth_tracker}
        for number, (at, _) in enumerate(scales[key] for key in _in_apexs_order(scales))
    }


def _in_apexs_order(scales: _Scales) -> list[str | None]:
    """Return the keys by number, if they have one: apex loads scales in their order, whatever their names."""
    keys = [key for key in scales if key is not None]
    return [None, *(sorted(keys, key=int) if all(str(key).isdecimal() for key in keys) else keys)]


# -- Paddle ------------------------------------------------------------------------------------------


def _read_paddle(state: Any, schedule: LossScaleSchedule | None) -> _Scales:
    scale = _scale(state, "scale")
    if not _flag(state, "use_dynamic_loss_scaling"):
        return {None: (ScaleState(scale), schedule or LossScaleSchedule.constant(scale))}
    rule = schedule or LossScaleSchedule(
        growth_factor=_factor(state, "incr_ratio"),
        backoff_factor=_factor(state, "decr_ratio"),
        growth_interval=_interval(state, "incr_every_n_steps"),
        min_scale=1.0,
        hysteresis=_count(state, "decr_every_n_nan_or_inf"),
        hysteresis_kind=Hysteresis.EVERY,
    )
    left = max(rule.hysteresis - _count(state, "decr_count"), 0)
    return {None: (ScaleState(scale, _count(state, "incr_count"), left), rule)}


def _write_paddle(scales: _Scales) -> dict[str, Any]:
    at, rule = scales[None]
    return {
        "scale": [at.scale],  # it takes element 0
        "incr_ratio": rule.growth_factor,
        "decr_ratio": rule.backoff_factor,
        "incr_every_n_steps": rule.growth_interval,
        "decr_every_n_nan_or_inf": rule.hysteresis,
        "incr_count": at.growth_tracker,
        "decr_count": rule.hysteresis - max(at.hysteresis_left, 1),
        "use_dynamic_loss_scaling": rule.min_scale != rule.max_scale,
    }


SYSTEMS: Mapping[str, System] = {
    "torch": System(
        known=_has("scale", "_growth_tracker"),
        read=_read_torch,
        write=_write_torch,
        limits={"min_scale": (), "max_scale": (), "hysteresis": (), "at_floor": ()},
    ),
    "amp_core": System(_has("scale", "_growth_tracker"), _read_torch, _write_own),
    "deepspeed": System(
        known=lambda state: "cur_scale" in _deepspeed_attributes(state),
        read=_read_deepspeed,
        write=_write_deepspeed,
        limits={"max_scale": (), "at_floor": (AtFloor.RAISE,)},
        kinds=(Hysteresis.BUDGET, Hysteresis.CONSECUTIVE),
        one_factor=True,
        has_constants=True,
    ),
    "megatron": System(
        known=lambda state: _has("growth_tracker", "hysteresis_tracker")(_megatron_entries(state)),
        read=_read_megatron,
        write=_write_megatron,
        limits={"max_scale": (), "at_floor": ()},
        kinds=(Hysteresis.BUDGET,),
    ),
    "apex": System(
        known=_has("loss_scaler0"),
        read=_read_apex,
        write=_write_apex,
        limits={"hysteresis": (), "at_floor": ()},
        one_factor=True,
    ),
    "paddle": System(
        known=_has("incr_ratio", "decr_every_n_nan_or_inf"),
        read=_read_paddle,
        write=_write_paddle,
        limits={"min_scale": (1.0,), "max_scale": (), "at_floor": ()},
        kinds=(Hysteresis.EVERY,),
        has_constants=True,
    ),
}
