"""The hooks through which a plugin hears of every scaler's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

from amp_core.plugin.hookspecs import NAME

if TYPE_CHECKING:
    from amp_core.scaling.grad_scaler import GradScaler
    from amp_core.scaling.hooks import ScaleChange
    from amp_core.scaling.step_record import StepRecord

_spec = pluggy.HookspecMarker(NAME)


@_spec
def amp_step(scaler: GradScaler, record: StepRecord) -> None:
    """Receive the record of a step, taken or skipped.

    Called at the end of `GradScaler.update`, once for each step since the previous update. While a plugin
    has one of these three hooks, each `update` of each scaler waits for the device once.

    Args:
        scaler: the scaler that took or skipped the step; its scale has been updated.
        record: complete; reading it waits no more.
    """


@_spec
def amp_skip(scaler: GradScaler, record: StepRecord) -> None:
    """Receive the record of a skipped step; called after `amp_step`, under the same conditions."""


@_spec
def amp_scale_change(scaler: GradScaler, change: ScaleChange) -> None:
    """Receive a change of the scale; called after the steps of the same update."""


__all__ = ["amp_scale_change", "amp_skip", "amp_step"]
