"""Leave torch's random generators as they were."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def kept_generators(device_type: str) -> AbstractContextManager[None]:
    """Restore the generators of the CPU, and of the accelerator if it has this type, after a block."""
    accelerator = torch.accelerator.current_accelerator()
    on_accelerator = accelerator is not None and accelerator.type == device_type
    devices = [torch.accelerator.current_device_index()] if on_accelerator else []
    return torch.random.fork_rng(devices, device_type=device_type if on_accelerator else "cpu")
