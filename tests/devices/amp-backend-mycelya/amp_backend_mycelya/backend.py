"""Everything that amp-core needs to know of ``mycelya`` devices."""

from __future__ import annotations

import torch
from mycelya_torch import get_all_machines

from amp_core.plugin import Availability, Backend


class MycelyaBackend(Backend):
    """Mixed precision on remote machines, with amp-core's portable kernels and uniform op policy."""

    device_type = "mycelya"
    api_version = 1
    has_float64 = False  # no view of it in another dtype, which casts of it need

    def availability(self) -> Availability:
        # `torch.mycelya.device_count()` is always 127.
        if not torch.mycelya.is_available():
            return Availability(False, "torch.mycelya.is_available() is False")
        machines = len(get_all_machines())
        return Availability(machines > 0, f"{machines} RemoteMachine(s) started")

    def default_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float16)
