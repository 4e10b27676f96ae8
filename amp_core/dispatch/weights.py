"""The weight casts of rules that run in Python: each parameter is cast once per region, as in torch.

torch's own cache cannot be reached from Python. This one is per thread, keyed by tensor, version and
dtype, so it holds no stale weight after an in-place update; it is cleared with the outermost region.
"""

from __future__ import annotations

import threading

import torch

_Entry = tuple[torch.Tensor, int, torch.Tensor]


class _Store(threading.local):
    def __init__(self) -> None:
        self.casts: dict[tuple[int, torch.dtype], _Entry] = {}


_store = _Store()


def cast(tensor: torch.Tensor, dtype: torch.dtype, low: torch.dtype) -> torch.Tensor:
    """Cast `tensor` to `dtype`, from the cache where torch's native kernels would use theirs.

    They do for a float32 leaf that requires grad, is no view and goes to the region's dtype `low`
    (``at::autocast::cached_cast``, 2.13).
    """
    if dtype is not low or not tensor.requires_grad or not _cacheable(tensor):
        return tensor.to(dtype)
    entry = _store.casts.get((id(tensor), dtype))
    if entry is not None and entry[0] is tensor and entry[1] == tensor._version:
        return entry[2]
    with torch.enable_grad():  # so that a first use under no_grad does not cut a later one off from the graph
        made = tensor.to(dtype)
    _store.casts[id(tensor), dtype] = (tensor, tensor._version, made)
    return made


def _cacheable(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype is torch.float32
        and tensor.is_leaf
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()
    )


def clear() -> None:
    """Drop the casts of this thread."""
    _store.casts.clear()
