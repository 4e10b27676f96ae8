"""Mirror of `torch.cuda.amp.grad_scaler`."""

import torch

import amp_core
from amp_compat._deprecated import init_of_scaler
from amp_core.scaling.grad_scaler import OptState  # noqa: F401  # code imports it from here

__all__ = ["GradScaler"]


class GradScaler(amp_core.GradScaler, torch.cuda.amp.GradScaler):
    """Deprecated: use ``amp_core.GradScaler("cuda", ...)`` with the same arguments.

    Warns:
        FutureWarning: with torch's text, at the caller's line.
    """

    _warning_stacklevel = 4
    __init__ = init_of_scaler("cuda")
