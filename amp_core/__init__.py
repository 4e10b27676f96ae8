"""Mixed precision for every PyTorch device, with the device as a plugin."""

from __future__ import annotations

from amp_core.errors import (
    AmpError,
    AmpWarning,
    BackendConflictError,
    BackendDisabledError,
    BackendError,
    BackendLoadError,
    BackendNotFoundError,
    PluginWarning,
    PolicyError,
)
from amp_core.plugin import backends, get_backend
from amp_core.policy import OpPolicy, apply_policy

__all__ = [
    "AmpError",
    "AmpWarning",
    "BackendConflictError",
    "BackendDisabledError",
    "BackendError",
    "BackendLoadError",
    "BackendNotFoundError",
    "OpPolicy",
    "PluginWarning",
    "PolicyError",
    "apply_policy",
    "backends",
    "get_backend",
]
