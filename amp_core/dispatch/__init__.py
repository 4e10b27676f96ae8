"""Puts an `OpPolicy` on torch's Autocast dispatch keys.

Where the policy in force is the one that torch compiled in, `activation` returns ``None`` and
amp-core costs nothing per op.
"""

from __future__ import annotations

from typing import Protocol

from amp_core.plugin.interface import Backend
from amp_core.policy import OpPolicy


class Activation(Protocol):
    """A policy made ready for one device type; `autocast` pushes and pops it, in pairs, per thread."""

    def push(self) -> None:
        """Put the policy in force for this thread."""

    def pop(self) -> None:
        """Take it off again; never raises."""


def activation(backend: Backend, policy: OpPolicy | None) -> Activation | None:
    """Prepare `policy` (default: the backend's own, or ``AMP_POLICY``) for regions on `backend`."""
    return None
