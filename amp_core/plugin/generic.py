"""The generic backend, for device types that torch can autocast and no plugin serves."""

from __future__ import annotations

import torch

from amp_core._torch.autocast import privateuse1_amp_dtypes, privateuse1_name
from amp_core.plugin.interface import Backend
from amp_core.plugin.results import Availability, described


class TorchBackend(Backend):
    """A backend that queries torch; it also serves PrivateUse1 devices, under any name.

    A PrivateUse1 device must follow torch's protocol: its module, registered with
    ``torch._register_device_module``, defines ``get_amp_supported_dtype() -> list[torch.dtype]``.
    """

    api_version = 1

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type  # type: ignore[misc]  # one class, many device types

    def availability(self) -> Availability:
        module = getattr(torch, self.device_type, None)
        is_available = getattr(module, "is_available", None)
        if not callable(is_available):
            return Availability(False, f"no module torch.{self.device_type} is loaded; import its package")
        try:
            usable = is_available()
        except Exception as error:
            what = f"torch.{self.device_type}.is_available() raised"
            return Availability(False, f"{what} {described(error)}")
        if not usable:
            return Availability(False, f"torch.{self.device_type}.is_available() is False")
        found = f"torch.{self.device_type}.is_available() is True"
        if type(self) is not TorchBackend:
            return Availability(True, found)
        return Availability(True, f"{found}; amp-core's generic backend serves it, as no package loaded does")

    def default_dtype(self) -> torch.dtype:
        return torch.get_autocast_dtype(self.device_type)

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        if self.device_type != privateuse1_name():
            return (torch.bfloat16, torch.float16)
        return tuple(privateuse1_amp_dtypes(self.device_type))

    def _display_name(self) -> str:
        if self.device_type == privateuse1_name():
            return self.device_type
        return self.device_type.upper()
