"""Everything that amp-core needs to know of ``openreg`` devices."""

from __future__ import annotations

import torch

from amp_core import OpPolicy
from amp_core.plugin import Availability, Backend


class OpenregBackend(Backend):
    """Mixed precision on torch's example of a device, with amp-core's portable kernels."""

    device_type = "openreg"
    api_version = 1

    def availability(self) -> Availability:
        if not torch.openreg.is_available():
            return Availability(False, "torch.openreg.is_available() is False")
        return Availability(True, f"{torch.openreg.device_count()} device(s)")

    def default_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float16)

    def op_policy(self) -> OpPolicy:
        return OpPolicy.uniform(self.device_type)  # its own autocast kernels are two, as an example
