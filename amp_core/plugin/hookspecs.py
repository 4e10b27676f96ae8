"""The hooks that amp-core calls in plugins: signatures only; `manager` calls them."""

from __future__ import annotations

from typing import Any

import pluggy

from amp_core.plugin.registry import Registry

NAME = "amp_core"
EVENTS = ("amp_step", "amp_skip", "amp_scale_change")
_spec = pluggy.HookspecMarker(NAME)


@_spec(historic=True)
def amp_register_backends(registry: Registry) -> None:
    """Register your backends with amp-core.

    Called once, when the plugin is loaded: on the first request for the device type that its entry point is
    named after, or for one that no entry point is named after, or when all backends are listed.

    Args:
        registry: call ``registry.add(backend)`` for each device type you support.
    """


@_spec
def amp_step(scaler: Any, record: Any) -> None:
    """Receive the record of a step, taken or skipped.

    Called at the end of `GradScaler.update`, once for each step since the previous update. While any plugin
    implements one of the three event hooks, each `update` of each scaler waits for the device once.

    Args:
        scaler: the `GradScaler` that took or skipped the step; its scale has been updated.
        record: the complete `StepRecord`; reading it does not wait for the device.
    """


@_spec
def amp_skip(scaler: Any, record: Any) -> None:
    """Receive the record of a skipped step; called after `amp_step`, under the same conditions.

    Args:
        scaler: as for `amp_step`.
        record: as for `amp_step`.
    """


@_spec
def amp_scale_change(scaler: Any, change: Any) -> None:
    """Receive a change of the scale; called after the steps of the same update.

    Args:
        scaler: as for `amp_step`.
        change: the `ScaleChange`.
    """


__all__ = ["amp_register_backends", "amp_scale_change", "amp_skip", "amp_step"]
