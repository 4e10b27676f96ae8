"""Mixed precision for every PyTorch device, with the device as a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amp_core._torch.internals import enter_autocast as _enter_autocast
from amp_core._torch.internals import exit_autocast as _exit_autocast
from amp_core.casts import CachedCasts, MasterWeights, cached_casts, master_weights
from amp_core.errors import (
    AmpError,
    AmpWarning,
    BackendConflictError,
    BackendDisabledError,
    BackendError,
    BackendLoadError,
    BackendNotFoundError,
    KernelLaunchError,
    PluginWarning,
    PolicyError,
    ScaleFloorError,
    ScaleFloorWarning,
    ScriptRegionError,
    SkippedStepsWarning,
    StaleCastError,
)
from amp_core.plugin import backends, get_backend
from amp_core.policy import OpPolicy, apply_policy
from amp_core.regions.autocast import autocast, disable, is_autocast_available
from amp_core.regions.custom_functions import _cast, custom_bwd, custom_fwd
from amp_core.regions.decorator import autocast_decorator
from amp_core.scaling.grad_scaler import GradScaler, OptState
from amp_core.scaling.hooks import ScaleChange
from amp_core.scaling.replicate import _MultiDeviceReplicator, _refresh_per_optimizer_state
from amp_core.scaling.step_record import BadParameter, History, StepRecord
from amp_core.scripting import script
from amp_core.states.loss_scale import AtFloor, Hysteresis, LossScaleSchedule

if TYPE_CHECKING:
    from amp_core.debugging.advice import Advice, advise
    from amp_core.debugging.comparison import Comparison, compare
    from amp_core.debugging.recording import Recording, record
    from amp_core.scaling.checkpoint_formats import convert_scaler_state
    from amp_core.scaling.window import AccumulationWindow

__all__ = [
    "AccumulationWindow",
    "Advice",
    "AmpError",
    "AmpWarning",
    "AtFloor",
    "BackendConflictError",
    "BackendDisabledError",
    "BackendError",
    "BackendLoadError",
    "BackendNotFoundError",
    "BadParameter",
    "CachedCasts",
    "Comparison",
    "GradScaler",
    "History",
    "Hysteresis",
    "KernelLaunchError",
    "LossScaleSchedule",
    "MasterWeights",
    "OpPolicy",
    "OptState",
    "PluginWarning",
    "PolicyError",
    "Recording",
    "ScaleChange",
    "ScaleFloorError",
    "ScaleFloorWarning",
    "ScriptRegionError",
    "SkippedStepsWarning",
    "StaleCastError",
    "StepRecord",
    "_MultiDeviceReplicator",
    "_cast",
    "_enter_autocast",
    "_exit_autocast",
    "_refresh_per_optimizer_state",
    "advise",
    "apply_policy",
    "autocast",
    "autocast_decorator",
    "backends",
    "cached_casts",
    "compare",
    "convert_scaler_state",
    "custom_bwd",
    "custom_fwd",
    "disable",
    "get_backend",
    "is_autocast_available",
    "master_weights",
    "record",
    "script",
]

_LAZY = {
    "AccumulationWindow": "amp_core.scaling.window",
    "Advice": "amp_core.debugging.advice",
    "Comparison": "amp_core.debugging.comparison",
    "Recording": "amp_core.debugging.recording",
    "advise": "amp_core.debugging.advice",
    "compare": "amp_core.debugging.comparison",
    "convert_scaler_state": "amp_core.scaling.checkpoint_formats",
    "record": "amp_core.debugging.recording",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value
