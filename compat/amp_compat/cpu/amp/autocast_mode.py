"""Mirror of `torch.cpu.amp.autocast_mode`."""

# No `from __future__ import annotations`: TorchScript does not read annotations that are strings.

import torch

from amp_compat._deprecated import DeprecatedAutocast


class autocast(  # noqa: N801  # torch's name
    DeprecatedAutocast,
    message=(
        "`torch.cpu.amp.autocast(args...)` is deprecated. "
        "Please use `torch.amp.autocast('cpu', args...)` instead."
    ),
):
    """Deprecated: a mixed-precision region on cpu. Use ``amp_core.autocast("cpu", ...)``.

    Args:
        enabled: ``False`` disables mixed precision in the region.
        dtype: the dtype of low-precision ops.
        cache_enabled: whether to cache weight casts until the outermost region ends.

    Warns:
        FutureWarning: on instantiation and subclassing, with torch's text, at the caller's line.
    """

    # torch.jit.script knows the region by this name, and compiles the methods below.
    _jit_override_qualname = "__torch__.torch.cpu.amp.autocast_mode.autocast"

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        cache_enabled: bool = True,
    ):
        if torch.jit.is_scripting():
            self._enabled = enabled
            self.device = "cpu"
            self.fast_dtype = dtype
            return
        self.configure("cpu", dtype, enabled, cache_enabled, None)

    __enter__ = DeprecatedAutocast.__enter__
    __exit__ = DeprecatedAutocast.__exit__


__all__ = ["autocast"]
