"""Write a device backend for amp-core, or list the installed ones.

Subclass `interface.Backend` and mark your hooks with `hookimpl`. The module docstring of `interface` shows a
complete plugin.
"""

from __future__ import annotations

import pluggy

from amp_core.plugin.default_manager import (
    backends,
    get_backend,
    register,
    replace_backend,
    unregister,
)
from amp_core.plugin.entry_points import ENTRY_POINT_GROUP
from amp_core.plugin.hookspecs import NAME
from amp_core.plugin.interface import API_VERSION, Backend
from amp_core.plugin.registry import Owner, Registry
from amp_core.plugin.results import Availability, Refusal
from amp_core.plugin.status import BackendStatus

hookimpl = pluggy.HookimplMarker(NAME)

__all__ = [
    "API_VERSION",
    "ENTRY_POINT_GROUP",
    "NAME",
    "Availability",
    "Backend",
    "BackendStatus",
    "Owner",
    "Refusal",
    "Registry",
    "backends",
    "get_backend",
    "hookimpl",
    "register",
    "replace_backend",
    "unregister",
]
