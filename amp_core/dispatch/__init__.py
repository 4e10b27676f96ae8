"""Apply an `OpPolicy` on torch's Autocast dispatch keys.

If the policy equals the one compiled into torch, `activation` returns ``None`` and amp-core adds no cost per
op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amp_core.dispatch.activate import Activation
    from amp_core.plugin.interface import Backend
    from amp_core.policy import OpPolicy

__all__ = ["activation"]


def activation(backend: Backend, policy: OpPolicy | None) -> Activation | None:
    """Prepare `policy` for regions on `backend`; see `amp_core.dispatch.activate.activation`."""
    from amp_core.dispatch.activate import activation as prepare

    return prepare(backend, policy)
