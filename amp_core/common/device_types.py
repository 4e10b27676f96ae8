"""Turn the device arguments that users pass into device types."""

from __future__ import annotations

import torch


def device_type_of(device: str | torch.device | torch.Tensor) -> str:
    """Return the device type that `device` refers to.

    Args:
        device: a device type (``"cuda"``), a device string (``"cuda:1"``: the index is ignored, as in
            torch), a ``torch.device``, a tensor (its device), or ``"auto"`` (the accelerator that is
            present, else ``"cpu"``).

    Raises:
        ValueError: with torch's text, for anything else.
    """
    if type(device) is str and device != "auto":  # the fast path: every region calls this
        return device.partition(":")[0]
    if isinstance(device, torch.Tensor):
        return device.device.type
    if isinstance(device, torch.device):
        return device.type
    if not isinstance(device, str):
        raise ValueError(f"Expected `device_type` of type `str`, got: `{type(device)}`")
    if device != "auto":  # a subclass of str, such as an enum
        return str.partition(device, ":")[0]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"
