"""Mixed precision for every PyTorch device, with the device as a plugin.

Names load on first use (PEP 562), so that the ``amp`` command answers without importing torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from amp_core import errors as _errors
from amp_core.common import op_lists as _lists
from amp_core.errors import *  # noqa: F403  # they need no torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amp_core._torch.autocast import enter_autocast as _enter_autocast
    from amp_core._torch.autocast import exit_autocast as _exit_autocast
    from amp_core.casts import (
        CachedCasts,
        LostUpdates,
        MasterWeights,
        StoredWeights,
        cached_casts,
        count_lost_updates,
        master_weights,
    )
    from amp_core.casts.delayed import DelayedScales, delayed_scales
    from amp_core.debugging.advice import Advice
    from amp_core.debugging.advise import advise
    from amp_core.debugging.comparison import Comparison, compare
    from amp_core.debugging.guard import guard
    from amp_core.debugging.recording import Recording, record
    from amp_core.debugging.watching import watch
    from amp_core.formats import Delayed, Quantization, Quantized, Recipe, quantize
    from amp_core.plugin import backends, get_backend
    from amp_core.policy import OpPolicy
    from amp_core.regions.activation_checkpoints import checkpoint_contexts
    from amp_core.regions.custom_functions import _cast, custom_bwd, custom_fwd
    from amp_core.regions.decorator import autocast_decorator
    from amp_core.regions.disabling import disable
    from amp_core.regions.materialize import materialize
    from amp_core.regions.modules import apply_policy
    from amp_core.regions.plan import PrecisionPlan
    from amp_core.regions.region import autocast, is_autocast_available
    from amp_core.scaling.checkpoint_formats import convert_scaler_state
    from amp_core.scaling.grad_scaler import GradScaler, OptState
    from amp_core.scaling.hooks import ScaleChange
    from amp_core.scaling.optimizer_state import _MultiDeviceReplicator, _refresh_per_optimizer_state
    from amp_core.scaling.step_record import BadParameter, History, StepRecord
    from amp_core.scaling.window import AccumulationWindow
    from amp_core.scripting import script
    from amp_core.states.loss_scale import AtFloor, Hysteresis, LossScaleSchedule

    __version__: str

__all__ = [
    "AccumulationWindow",
    "Advice",
    "AtFloor",
    "BadParameter",
    "CachedCasts",
    "Comparison",
    "Delayed",
    "DelayedScales",
    "GradScaler",
    "History",
    "Hysteresis",
    "LossScaleSchedule",
    "LostUpdates",
    "MasterWeights",
    "OpPolicy",
    "OptState",
    "PrecisionPlan",
    "Quantization",
    "Quantized",
    "Recipe",
    "Recording",
    "ScaleChange",
    "StepRecord",
    "StoredWeights",
    "_MultiDeviceReplicator",
    "__version__",
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
    "checkpoint_contexts",
    "compare",
    "convert_scaler_state",
    "count_lost_updates",
    "custom_bwd",
    "custom_fwd",
    "delayed_scales",
    "disable",
    "get_backend",
    "guard",
    "is_autocast_available",
    "master_weights",
    "materialize",
    "quantize",
    "record",
    "script",
    "watch",
]
__all__ += _errors.__all__

_NAMES = {
    "_torch.autocast": "_enter_autocast=enter_autocast _exit_autocast=exit_autocast",
    "casts": (
        "CachedCasts LostUpdates MasterWeights StoredWeights cached_casts count_lost_updates master_weights"
    ),
    "casts.delayed": "DelayedScales delayed_scales",
    "debugging.advice": "Advice",
    "debugging.comparison": "Comparison compare",
    "debugging.guard": "guard",
    "debugging.recording": "Recording record",
    "debugging.advise": "advise",
    "debugging.watching": "watch",
    "formats": "Delayed Quantization Quantized Recipe quantize",
    "plugin": "backends get_backend",
    "policy": "OpPolicy",
    "regions.materialize": "materialize",
    "regions.modules": "apply_policy",
    "regions.plan": "PrecisionPlan",
    "regions.region": "autocast is_autocast_available",
    "regions.custom_functions": "_cast custom_bwd custom_fwd",
    "regions.activation_checkpoints": "checkpoint_contexts",
    "regions.decorator": "autocast_decorator",
    "regions.disabling": "disable",
    "scaling.checkpoint_formats": "convert_scaler_state",
    "scaling.grad_scaler": "GradScaler OptState",
    "scaling.hooks": "ScaleChange",
    "scaling.optimizer_state": "_MultiDeviceReplicator _refresh_per_optimizer_state",
    "scaling.step_record": "BadParameter History StepRecord",
    "scaling.window": "AccumulationWindow",
    "scripting": "script",
    "states.loss_scale": "AtFloor Hysteresis LossScaleSchedule",
}
_SUBMODULES = {
    "callbacks",
    "debugging",
    "errors",
    "formats",
    "integrations",
    "kernels",
    "plugin",
    "policy",
    "testing",
}


def _homes() -> dict[str, tuple[str, str]]:
    """Map each public name to its module and its name there."""
    homes = {}
    for module, names in _NAMES.items():
        for entry in names.split():
            public, _, private = entry.partition("=")
            homes[public] = (f"{__name__}.{module}", private or public)
    return homes


_HOMES = _homes()


def _load(name: str) -> object:
    if "torch._dynamo" not in sys.modules:
        return _import(name)
    # The first use may be in code between graphs, where Dynamo would compile what an import runs.
    from torch.compiler import disable as uncompiled

    return uncompiled(_import)(name)  # type: ignore[no-untyped-call]


def _import(name: str) -> object:
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import version

        return version("amp-core")
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


if not TYPE_CHECKING:  # a type checker that saw it would accept every name

    def __getattr__(name):
        value = globals()[name] = _load(name)
        return value


def _op_lists(device_type: str) -> Mapping[str, str]:
    from amp_core.plugin.default_manager import op_lists

    return op_lists(device_type)


_lists.set_source(_op_lists)  # policies are data: they cannot load the devices that they ask for


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
