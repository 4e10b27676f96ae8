"""The region that rewritten functions enter: a TorchScript class that enters eager autocast.

Eager autocast acts in the dispatcher, which scripted code also goes through, so ops in such a region follow
the same rules as in eager mode. TorchScript's own autocast pass has fewer rules and guesses at unknown
dtypes.
"""

# No `from __future__ import annotations`: TorchScript cannot read string annotations.

import threading
import warnings
from typing import Any

import torch

from amp_core._torch import torchscript as _torch_script
from amp_core.regions.region import autocast


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entered: list[autocast] = []


_thread = _Thread()
_GRADIENTS = (
    "Other scripted code calls this autocast region, or `.scripted` does. There TorchScript derives "
    "gradients by formulas that do not see the region's casts; they may be wrong or raise an error. To "
    "train, call what amp_core.script returned from Python, or put "
    "`with torch.jit.optimized_execution(False):` around each call. Otherwise call it under torch.no_grad()."
)


@torch.jit.ignore  # type: ignore[untyped-decorator]
def enter_region(device: str, dtype: str, enabled: bool) -> None:
    """Enter eager autocast in this thread; an empty `dtype` means the device's default.

    Warns:
        UserWarning: TorchScript may differentiate the region without its casts.
    """
    if _torch_script.derives_gradients():
        warnings.warn(_GRADIENTS, UserWarning, stacklevel=2)
    region = autocast(device, getattr(torch, dtype) if dtype else None, enabled)
    region.__enter__()
    _thread.entered.append(region)


@torch.jit.ignore  # type: ignore[untyped-decorator]
def exit_region() -> None:
    """Leave the region that this thread entered last."""
    _thread.entered.pop().__exit__(None, None, None)


class Region:
    """Replaces ``autocast`` in the source that TorchScript compiles."""

    def __init__(self, device: str, dtype: str, enabled: bool):
        self.device = device
        self.dtype = dtype
        self.enabled = enabled

    def __enter__(self) -> None:
        enter_region(self.device, self.dtype, self.enabled)

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        exit_region()
