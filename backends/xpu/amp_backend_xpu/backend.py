"""The XPU backend for Intel GPUs."""

from __future__ import annotations

import torch

from amp_core.kernels import Kernels
from amp_core.kernels.gpu import foreach_kernels, kernels_of
from amp_core.plugin import Availability, Backend
from amp_core.policy.tables import SHARED


class XpuBackend(Backend):
    """Intel GPUs: float16 by default, and bfloat16."""

    device_type = "xpu"
    api_version = 1
    _default_is_torchs = True
    op_lists = SHARED
    aliases = ("intel",)

    @property
    def has_float64(self) -> bool:  # type: ignore[override]  # queried from the driver
        """Whether all available GPUs support float64; some consumer models do not."""
        devices = range(torch.xpu.device_count())
        return all(torch.xpu.get_device_properties(i).has_fp64 for i in devices)

    def availability(self) -> Availability:
        if torch.xpu.is_available():
            count = torch.xpu.device_count()
            return Availability(True, f"{count} GPU(s), first: {torch.xpu.get_device_name(0)}")
        if torch.version.xpu is None:
            return Availability(False, f"torch {torch.__version__} is built without XPU")
        return Availability(
            False, f"torch {torch.__version__} is built for XPU, but no GPU or no driver was found"
        )

    def default_dtype(self) -> torch.dtype:
        return torch.get_autocast_dtype("xpu")

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float16)

    def kernels(self) -> Kernels:
        """Return the Triton kernels, or torch's if Triton or a suitable GPU is missing."""
        available = torch.xpu.is_initialized() or torch.xpu.is_available()  # type: ignore[no-untyped-call]
        return kernels_of("xpu", "intel", has_float64=self.has_float64) if available else _NONE


_NONE = foreach_kernels("no GPU is available for Triton")
