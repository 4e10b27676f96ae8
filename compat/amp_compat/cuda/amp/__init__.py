"""Mirror of `torch.cuda.amp`, over amp_core."""

from amp_compat.cuda.amp.autocast_mode import autocast, custom_bwd, custom_fwd
from amp_compat.cuda.amp.common import amp_definitely_not_available
from amp_compat.cuda.amp.grad_scaler import GradScaler

__all__ = [
    "GradScaler",
    "amp_definitely_not_available",
    "autocast",
    "custom_bwd",
    "custom_fwd",
]
