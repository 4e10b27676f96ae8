"""The AMP part of the device ``npy``: everything that amp-core needs to know of it."""

from __future__ import annotations

import torch

from amp_backend_example import device
from amp_core.plugin import Availability, Backend


class NpyBackend(Backend):
    """Mixed precision on memory of NumPy's, with amp-core's portable kernels and uniform op policy."""

    device_type = device.NAME
    api_version = 1

    def availability(self) -> Availability:
        module = getattr(torch, device.NAME)
        if not module.is_available():
            return Availability(False, f"torch.{device.NAME}.is_available() is False")
        return Availability(True, f"{module.device_count()} device, memory in NumPy {device.np.__version__}")

    def default_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float16)
