"""A configurable backend for testing amp-core and the kit without an accelerator."""

from __future__ import annotations

import torch

from amp_core.kernels import PORTABLE, Kernels
from amp_core.plugin import Availability, Backend
from amp_core.policy import OpPolicy


class Loopback(Backend):
    """A correct backend except where its arguments change it; on the CPU by default.

    Args:
        device_type: a device type known to torch.
        kernels: its kernels; by default the portable ones.
        policy: its op policy; by default torch's.
        dtypes: its supported dtypes, in any order.
        default: its default dtype; by default torch's for the device type.
    """

    api_version = 1

    def __init__(
        self,
        device_type: str = "cpu",
        *,
        kernels: Kernels = PORTABLE,
        policy: OpPolicy | None = None,
        dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16),
        default: torch.dtype | None = None,
    ) -> None:
        self.device_type = device_type  # type: ignore[misc]  # one class, many device types
        self._kernels, self._policy, self._dtypes, self._default = kernels, policy, dtypes, default

    def availability(self) -> Availability:
        """Report the device as available."""
        return Availability(True, f"loopback on {self.device_type}")

    def default_dtype(self) -> torch.dtype:
        """Return the argument, or torch's."""
        return self._default or torch.get_autocast_dtype(self.device_type)

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the argument."""
        return self._dtypes

    def op_policy(self) -> OpPolicy:
        """Return the argument, or torch's."""
        return super().op_policy() if self._policy is None else self._policy

    def kernels(self) -> Kernels:
        """Return the argument."""
        return self._kernels
