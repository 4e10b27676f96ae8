"""Mirror of `torch.cuda.amp.autocast_mode`."""

# No `from __future__ import annotations`: TorchScript does not read annotations that are strings.

import torch

import amp_core
from amp_compat._deprecated import DeprecatedAutocast, deprecated_function
from amp_core.regions.custom_functions import _cast as core_cast


class autocast(  # noqa: N801  # torch's name
    DeprecatedAutocast,
    message=(
        "`torch.cuda.amp.autocast(args...)` is deprecated. "
        "Please use `torch.amp.autocast('cuda', args...)` instead."
    ),
):
    """Deprecated: a mixed-precision region on cuda. Use ``amp_core.autocast("cuda", ...)``.

    Args:
        enabled: ``False`` disables mixed precision in the region.
        dtype: the dtype of low-precision ops.
        cache_enabled: whether to cache weight casts until the outermost region ends.

    Warns:
        FutureWarning: on instantiation and subclassing, with torch's text, at the caller's line.
    """

    # torch.jit.script knows the region by this name, and compiles the methods below.
    _jit_override_qualname = "__torch__.torch.cuda.amp.autocast_mode.autocast"

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.float16,
        cache_enabled: bool = True,
    ):
        if torch.jit.is_scripting():
            self._enabled = enabled
            self.device = "cuda"
            self.fast_dtype = dtype
            return
        self.configure("cuda", dtype, enabled, cache_enabled, None)

    __enter__ = DeprecatedAutocast.__enter__
    __exit__ = DeprecatedAutocast.__exit__


@deprecated_function(
    "`torch.cuda.amp.autocast_mode._cast(value, dtype)` is deprecated. "
    "Please use `torch.amp.autocast_mode._cast(value, 'cuda', dtype)` instead."
)
def _cast(value, dtype):  # type: ignore[no-untyped-def]  # torch's has no annotations either
    return core_cast(value, "cuda", dtype)


@deprecated_function(
    "`torch.cuda.amp.custom_fwd(args...)` is deprecated. "
    "Please use `torch.amp.custom_fwd(args..., device_type='cuda')` instead."
)
def custom_fwd(fwd=None, *, cast_inputs=None):  # type: ignore[no-untyped-def]
    """Deprecated: use ``amp_core.custom_fwd(..., device_type="cuda")``."""
    return amp_core.custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)


@deprecated_function(
    "`torch.cuda.amp.custom_bwd(args...)` is deprecated. "
    "Please use `torch.amp.custom_bwd(args..., device_type='cuda')` instead."
)
def custom_bwd(bwd):  # type: ignore[no-untyped-def]
    """Deprecated: use ``amp_core.custom_bwd(..., device_type="cuda")``."""
    return amp_core.custom_bwd(bwd, device_type="cuda")


__all__ = ["autocast", "custom_bwd", "custom_fwd"]
