"""Mirror of `torch.cuda.amp.grad_scaler`."""

import torch

import amp_core
from amp_compat._deprecated import deprecated_function
from amp_core.scaling.grad_scaler import OptState  # noqa: F401  # code imports it from here

__all__ = ["GradScaler"]


class GradScaler(amp_core.GradScaler, torch.cuda.amp.GradScaler):
    """Deprecated: use ``amp_core.GradScaler("cuda", ...)`` with the same arguments.

    Warns:
        FutureWarning: with torch's text, at the caller's line.
    """

    _warning_stacklevel = 4

    @deprecated_function(
        "`torch.cuda.amp.GradScaler(args...)` is deprecated. "
        "Please use `torch.amp.GradScaler('cuda', args...)` instead."
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
            self, "cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
