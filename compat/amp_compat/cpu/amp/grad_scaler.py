"""Mirror of `torch.cpu.amp.grad_scaler`."""

import torch

import amp_core
from amp_compat._deprecated import deprecated_function

__all__ = ["GradScaler"]


class GradScaler(amp_core.GradScaler, torch.cpu.amp.GradScaler):
    """Deprecated: use ``amp_core.GradScaler("cpu", ...)`` with the same arguments.

    Warns:
        FutureWarning: with torch's text, at the caller's line.
    """

    @deprecated_function(
        "`torch.cpu.amp.GradScaler(args...)` is deprecated. "
        "Please use `torch.amp.GradScaler('cpu', args...)` instead."
    )
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        amp_core.GradScaler.__init__(
            self, "cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
