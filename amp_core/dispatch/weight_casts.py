"""Look up casts of weights, for every op under any rule or scope.

There are two caches. A scope such as `cached_casts` keeps the casts of its model until a weight changes, for
all threads. A region whose rules run in Python keeps the casts that torch's own kernels would keep, for its
thread and until the outermost region ends.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from amp_core._torch import cast_cache
from amp_core._torch.autograd import has_gradient_hooks
from amp_core._torch.tensors import (
    WeakStorage,
    identity_of,
    is_dtensor,
    is_freed,
    is_tensor_view,
    part_of,
    version_of,
)
from amp_core._torch.tracing import calls_are_captured
from amp_core.common.once import once
from amp_core.dispatch.sources import Sources
from amp_core.dispatch.target_dtype import eligible

Fingerprint = tuple[object, ...]


class CachedCast(NamedTuple):
    """A cast, with the fingerprint and the storage that its weight had when it was cast."""

    fingerprint: Fingerprint
    memory: WeakStorage
    cast: Tensor

    def is_only_hooked(self, weight: Tensor) -> bool:
        """Return whether `weight` is unchanged but for its gradient hooks."""
        return fingerprint(weight)[:-1] == self.fingerprint[:-1] and not is_freed(self.memory.cdata)

    def is_fresh(self, weight: Tensor) -> bool:
        """Return whether `weight` is unchanged, as far as torch can tell."""
        # Another tensor may reuse freed memory at the same address.
        return fingerprint(weight) == self.fingerprint and not is_freed(self.memory.cdata)


_PLAIN = (Parameter, Tensor)


def fingerprint(weight: Tensor) -> Fingerprint:
    """Return a value that changes when `weight` is written to, replaced, moved, frozen or hooked."""
    part = weight if type(weight) in _PLAIN else part_of(weight)
    return (
        identity_of(weight),
        _version(weight),
        0 if part is weight else _version(part),  # the program may write to a DTensor's part, too
        part.data_ptr(),
        part.shape,
        part.stride(),
        weight.requires_grad,
        has_gradient_hooks(weight),
    )


def _version(tensor: Tensor) -> object:
    try:
        return version_of(tensor)
    except RuntimeError:  # an inference tensor, swapped in for a weight: its writes are not counted
        return object()


def cached(weight: Tensor, state: Fingerprint, cast: Tensor) -> CachedCast:
    """Return the cache entry for a cast of `weight` made when its fingerprint was `state`."""
    memory = WeakStorage(part_of(weight).untyped_storage())  # type: ignore[no-untyped-call]
    return CachedCast(state, memory, cast)


# Casts kept by scopes.


class CastSource(Protocol):
    """A scope that keeps the casts of some weights."""

    def lookup(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the cast of `weight`, creating it if necessary; None if the scope does not cover it."""


CASTS: dict[torch.dtype, dict[int, CachedCast]] = defaultdict(dict)
"""The casts of all scopes, by dtype and by the weight's ``id``. A scope keeps its weights alive, so no ``id``
is reused while its entry exists."""

sources = Sources[CastSource]()


def replace_weights(args: Sequence[Any], device_type: str) -> Sequence[Any]:
    """Replace weights among a low-precision op's arguments with the casts that scopes keep.

    torch's own kernel casts the rest. Nothing is replaced while the call is captured or transformed: a graph
    would bake in the cast as a constant.
    """
    if not sources.active or calls_are_captured():
        return args
    dtype = torch.get_autocast_dtype(device_type)
    if dtype is torch.float32:
        return args
    casts = CASTS[dtype]
    replaced = []
    for arg in args:
        entry = casts.get(id(arg))
        if entry is not None and entry.is_fresh(arg):
            replaced.append(entry.cast)
        elif (
            isinstance(arg, Tensor)
            and arg.dtype is torch.float32  # most are activations
            and arg.is_leaf
            and eligible(arg, device_type)
        ):
            cast = _from_scopes(arg, dtype)
            replaced.append(arg if cast is None else cast)
        else:
            replaced.append(arg)
    return replaced


def _from_scopes(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    for source in sources.active:
        cast = source.lookup(tensor, dtype)
        if cast is not None:
            return cast
    return None


# Casts kept by regions.


class _RegionCasts(threading.local):
    def __init__(self) -> None:
        self.casts: dict[tuple[int, torch.dtype], tuple[Tensor, CachedCast]] = {}


_region = _RegionCasts()


_METHODS: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: Tensor.float,
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
}


def to_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor.to(dtype)``, which is slower: it has to try many signatures."""
    method = _METHODS.get(dtype)
    return tensor.to(dtype) if method is None else method(tensor)


def cast(tensor: Tensor, dtype: torch.dtype, device_type: str | None) -> Tensor:
    """Cast `tensor` to `dtype`, using a cache where torch's own kernels would use theirs.

    torch caches the cast of a float32 leaf that requires grad, is not a view and is cast to the region's
    dtype (``at::autocast::cached_cast``, 2.13). Scopes also keep casts of frozen weights.

    Args:
        tensor: a tensor eligible for autocast, not yet of `dtype`.
        dtype: the dtype that the op's rule requires.
        device_type: the region's device type; None bypasses the cache, for an op that writes to the result.
    """
    if device_type is not None and (tensor.requires_grad or sources.active):
        reused = _cached_cast(tensor, dtype, device_type)
        if reused is not None:
            return reused
    return to_dtype(tensor, dtype)


def is_cacheable(weight: Tensor) -> bool:
    """Return whether a cast of `weight` may be cached: a float32 leaf, plain or a DTensor, with a version."""
    return (
        weight.dtype is torch.float32
        and (type(weight) in _PLAIN or is_dtensor(weight))
        and weight.is_leaf
        and weight.layout is torch.strided
        and not (is_tensor_view(weight) or weight.is_nested or weight.is_inference())
    )


def _cached_cast(tensor: Tensor, dtype: torch.dtype, device_type: str) -> Tensor | None:
    cacheable = dtype is torch.get_autocast_dtype(device_type) and is_cacheable(tensor)
    if not cacheable or calls_are_captured():
        return None
    scope_cast = _from_scopes(tensor, dtype)
    if scope_cast is not None or not tensor.requires_grad or not _region_caches():
        return scope_cast
    return _from_region(tensor, dtype)


def _region_caches() -> bool:
    return torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()


def _from_region(weight: Tensor, dtype: torch.dtype) -> Tensor:
    entry = _region.casts.get((id(weight), dtype))
    if entry is not None and entry[0] is weight and entry[1].is_fresh(weight):
        return entry[1].cast
    _when_torchs_is_cleared(_clear)
    state = fingerprint(weight)
    with torch.enable_grad():  # a first use under no_grad must not detach later uses from the graph
        new_cast = weight.to(dtype)
    _region.casts[id(weight), dtype] = weight, cached(weight, state, new_cast)
    return new_cast


def _clear() -> None:
    """Drop the casts kept by this thread's regions."""
    _region.casts.clear()


_when_torchs_is_cleared = once(cast_cache.when_cleared)
