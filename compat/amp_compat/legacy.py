"""The API of `torch.cuda.amp` before PyTorch 1.10, for old code.

It has no dtype or cache arguments and gives no deprecation warnings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import amp_core
from amp_compat.cuda.amp.common import amp_definitely_not_available

__all__ = ["autocast", "custom_bwd", "custom_fwd"]


class autocast(amp_core.autocast):  # noqa: N801  # torch's name
    """A float16 autocast region on CUDA; `enabled` is the only argument.

    Warns:
        UserWarning: CUDA is not available and the region is disabled (PyTorch 1.9's message).
    """

    def __init__(self, enabled: bool = True) -> None:
        if enabled and amp_definitely_not_available():
            warnings.warn(
                "torch.cuda.amp.autocast only affects CUDA ops, but CUDA is not available.  Disabling.",
                stacklevel=2,
            )
            enabled = False
        self.configure("cuda", torch.float16, enabled, None, None)


def custom_fwd(fwd: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Decorate ``forward`` of a CUDA autograd function; `cast_inputs` is the only keyword.

    Raises:
        AssertionError: several keywords were passed.
        KeyError: a keyword other than `cast_inputs` was passed.
    """
    cast_inputs = None
    if kwargs:
        assert len(kwargs) == 1
        cast_inputs = kwargs["cast_inputs"]
    return amp_core.custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``backward`` of a CUDA autograd function."""
    return amp_core.custom_bwd(bwd, device_type="cuda")
