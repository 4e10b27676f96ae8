"""The weight casts of rules that run in Python: each parameter is cast once per region, as in torch.

torch's own cache cannot be reached from Python. This one is per thread, keyed by tensor, version and
dtype, so it holds no stale weight after an in-place update; it is cleared with the outermost region.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

_Entry = tuple[torch.Tensor, int, torch.Tensor]


class _Store(threading.local):
    def __init__(self) -> None:
        self.casts: dict[tuple[int, torch.dtype], _Entry] = {}


_store = _Store()


# `Tensor.to` has many forms to parse its arguments for.
_METHODS: dict[torch.dtype, Callable[[torch.Tensor], torch.Tensor]] = {
    torch.float32: torch.Tensor.float,
    torch.float16: torch.Tensor.half,
    torch.bfloat16: torch.Tensor.bfloat16,
}


def cast(tensor: torch.Tensor, dtype: torch.dtype, device_type: str | None) -> torch.Tensor:
    """Cast `tensor` to `dtype`, from the cache where torch's native kernels would use theirs.

    They do for a float32 leaf that requires grad, is no view and goes to the dtype of the region on
    `device_type` (``at::autocast::cached_cast``, 2.13); where that is None, nothing is kept.
    """
    if tensor.requires_grad and device_type is not None and _cacheable(tensor, dtype, device_type):
        return _kept(tensor, dtype)
    method = _METHODS.get(dtype)
    return tensor.to(dtype) if method is None else method(tensor)


def _kept(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    entry = _store.casts.get((id(tensor), dtype))
    if entry is not None and entry[0] is tensor and entry[1] == tensor._version:
        return entry[2]
    with torch.enable_grad():  # so that a first use under no_grad does not cut a later one off from the graph
        made = tensor.to(dtype)
    _store.casts[id(tensor), dtype] = (tensor, tensor._version, made)
    return made


def _cacheable(tensor: torch.Tensor, dtype: torch.dtype, device_type: str) -> bool:
    return (
        dtype is torch.get_autocast_dtype(device_type)
        and tensor.dtype is torch.float32
        and tensor.is_leaf
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()
    )


def clear() -> None:
    """Drop the casts of this thread."""
    _store.casts.clear()
