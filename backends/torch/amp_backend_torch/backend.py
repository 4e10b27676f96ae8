"""Facts about devices that torch supports itself but does not expose."""

from __future__ import annotations

from amp_backend_torch.op_policy import MPS
from amp_core.plugin.generic import TorchBackend
from amp_core.policy.tables import SHARED


class MpsBackend(TorchBackend):
    """Apple's GPUs, which do not support float64."""

    op_lists = MPS
    has_float64 = False
    aliases = ("metal",)


class MtiaBackend(TorchBackend):
    """Meta's accelerators."""

    op_lists = SHARED


class MaiaBackend(TorchBackend):
    """Microsoft's accelerators."""

    op_lists = SHARED
