"""Mirror of `torch.cpu.amp.grad_scaler`."""

import torch

import amp_core
from amp_compat._deprecated import init_of_scaler

__all__ = ["GradScaler"]


class GradScaler(amp_core.GradScaler, torch.cpu.amp.GradScaler):
    """Deprecated: use ``amp_core.GradScaler("cpu", ...)`` with the same arguments.

    Warns:
        FutureWarning: with torch's text, at the caller's line.
    """

    __init__ = init_of_scaler("cpu")
