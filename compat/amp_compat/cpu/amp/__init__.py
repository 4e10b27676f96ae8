"""Mirror of `torch.cpu.amp`, over amp_core."""

from amp_compat.cpu.amp.autocast_mode import autocast
from amp_compat.cpu.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast"]
