"""The hooks that amp-core calls in plugins. Names and arguments only; `manager` calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from amp_core.plugin.registry import Registry
    from amp_core.scaling.grad_scaler import GradScaler
    from amp_core.scaling.hooks import ScaleChange
    from amp_core.scaling.step_record import StepRecord

NAME = "amp_core"
_spec = pluggy.HookspecMarker(NAME)


@_spec(historic=True)
def amp_register_backends(registry: Registry) -> None:
    """Hand your backends to amp-core.

    Called once, when the plugin is loaded: on the first request for a device type that its entry
    point is named after, or when all backends are listed.

    Args:
        registry: call ``registry.add(backend)`` for each device type you serve.
    """


@_spec
def amp_step(scaler: GradScaler, record: StepRecord) -> None:
    """Look at a step, taken or skipped.

    Called in `GradScaler.update`, last, for each step since the update before. While a plugin has one
    of these three hooks, each `update` of each scaler waits for the device once.

    Args:
        scaler: took or skipped it; its scale has moved already.
        record: complete; reading it waits no more.
    """


@_spec
def amp_skip(scaler: GradScaler, record: StepRecord) -> None:
    """Look at a step that was skipped; after `amp_step`, otherwise as it."""


@_spec
def amp_scale_change(scaler: GradScaler, change: ScaleChange) -> None:
    """Look at a move of the scale; after the steps of the same update, otherwise as `amp_step`."""


__all__ = ["amp_register_backends", "amp_scale_change", "amp_skip", "amp_step"]
