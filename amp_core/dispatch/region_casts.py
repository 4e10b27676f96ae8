"""Casts for kernels that run in Python: kept as torch's own kernels would keep theirs.

A thread keeps them until its outermost region ends.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import torch
from torch import Tensor

from amp_core._torch import cast_cache
from amp_core._torch.tensors import is_tensor_view
from amp_core.common.cast import to_dtype
from amp_core.dispatch.fingerprints import CachedCast, cached, fingerprint

AsTorch = dict[int, tuple[Tensor, Tensor]]
"""Weights and their casts, by the weight's ``id``, which no other tensor has while its entry exists."""


class _Thread(threading.local):
    """The casts of one thread, by dtype and by the weight's ``id``."""

    def __init__(self) -> None:
        self.casts: dict[torch.dtype, dict[int, tuple[Tensor, CachedCast]]] = defaultdict(dict)
        self.as_torch: dict[torch.dtype, AsTorch] = defaultdict(dict)


_thread = _Thread()


def region_caches() -> bool:
    """Return whether torch's own kernels would keep casts now."""
    return torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()


def cast_for_rule(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the cast of `weight` to `dtype`, one for all rules."""
    casts = _thread.casts[dtype]
    entry = casts.get(id(weight))
    if entry is not None and entry[0] is weight and entry[1].is_fresh(weight):
        return entry[1].cast
    state = fingerprint(weight)
    cast = _cast(weight, dtype)
    casts[id(weight)] = weight, cached(weight, state, cast, alone=True)
    return cast


def as_torch(dtype: torch.dtype) -> AsTorch | None:
    """Return the casts that this thread keeps in place of torch's own kernels; None if those keep none."""
    return _thread.as_torch[dtype] if region_caches() else None


def cast_as_torch(tensor: Tensor, dtype: torch.dtype, casts: AsTorch) -> Tensor | None:
    """Return the cast of `tensor`, a float32 leaf, if torch's own kernels would keep it.

    As theirs, the cast is that of the first use in the region, even if the weight has changed since. Unlike
    theirs, it has the dtype of the region around the call.
    """
    if not tensor.requires_grad or is_tensor_view(tensor):
        return None
    entry = casts.get(id(tensor))
    if entry is None:
        entry = casts[id(tensor)] = tensor, _cast(tensor, dtype)
    return entry[1]


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    cast_cache.when_cleared(_clear)
    with torch.enable_grad():  # a first use under no_grad must not detach later uses from the graph
        return to_dtype(weight, dtype)


def _clear() -> None:
    for casts in list(_thread.casts.values()):  # a finalizer may add one
        casts.clear()
    for others in list(_thread.as_torch.values()):
        others.clear()
