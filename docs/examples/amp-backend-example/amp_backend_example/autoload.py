"""What the entry point of group ``torch.backends`` calls: ``import torch`` makes the device known."""

from __future__ import annotations


def load() -> None:
    """Make the device known to torch."""
    from amp_backend_example import device

    device.register()
