"""The scaler states of other systems, read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amp_core.scaling.checkpoint_layouts import SYSTEMS, System
from amp_core.states.loss_scale import LossScaleSchedule


def convert_scaler_state(
    state: Any,
    *,
    to: str = "amp_core",
    source: str | None = None,
    schedule: LossScaleSchedule | None = None,
    lossy: bool = False,
) -> Any:
    """Convert the state of a loss scaler between systems, so that training goes on as it would have.

    Systems: ``"amp_core"``, ``"torch"``, ``"deepspeed"``, ``"megatron"``, ``"apex"``, ``"paddle"``.

    Args:
        state: what the system's ``state_dict`` returned. For DeepSpeed, also its loss scaler itself, or an
            optimizer's state that holds it; for Megatron, also an optimizer's state (``"grad_scaler"``).
        to: the system that will load the result.
        source: the system that saved `state`; by default, it is recognised by its entries.
        schedule: the rule by which the scale moved, if it is neither in the state (Megatron and apex save
            none of it) nor that system's default.
        lossy: convert even if `to` cannot hold the whole schedule, or several scales.

    Returns:
        a new state: a dict, for DeepSpeed the attributes of its ``DynamicLossScaler``.

    Raises:
        ValueError: no known system saved `state`, `to` or `source` is unknown, an entry is out of range, or
            `to` has no place for something and `lossy` is not set. Megatron and apex keep the rule in their
            own settings, so what these can say is left out without an error: set it there.
        KeyError: an entry is missing.
        TypeError: `state`, an entry of it or `schedule` has the wrong type.

    Example::

        state = convert_scaler_state(torch.amp.GradScaler("cpu").state_dict(), to="deepspeed")
    """
    if not isinstance(state, Mapping) and not hasattr(state, "cur_scale"):
        raise TypeError(f"The state of a loss scaler must be a mapping, got {state!r}.")
    read = _system(source) if source is not None else _recognised(state)
    target = _system(to)
    if not isinstance(schedule, LossScaleSchedule | None):
        raise TypeError(f"schedule= must be an amp_core.LossScaleSchedule, not {schedule!r}.")
    scales = read.read(state, schedule)
    lost = {text for _, rule in scales.values() for text in target.cannot(rule)}
    if len(scales) > 1 and to not in ("amp_core", "apex"):
        lost.add(f"the scales of the keys {', '.join(repr(k) for k in scales if k is not None)}")
    if lost and not lossy:
        raise ValueError(
            f"{to} has no place for {'; '.join(sorted(lost))}. Pass lossy=True to leave that out."
        )
    return target.write(scales)


def _system(name: str) -> System:
    if not isinstance(name, str) or name not in SYSTEMS:
        raise ValueError(f"Unknown system {name!r}; the systems are {', '.join(map(repr, sorted(SYSTEMS)))}.")
    return SYSTEMS[name]


def _recognised(state: Any) -> System:
    for system in SYSTEMS.values():
        if system.known(state):
            return system
    entries = ", ".join(map(repr, state if isinstance(state, Mapping) else vars(state)))
    raise ValueError(
        f"This is the scaler state of no known system: {entries or 'an empty dict'}. A scaler that is "
        f"disabled, or whose scale is constant, may have saved nothing."
    )
