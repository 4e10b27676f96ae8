"""Look up casts of weights, for every op under any rule or scope.

There are two caches. A scope such as `cached_casts` keeps the casts of its model until a weight changes, for
all threads. A thread keeps those of kernels that run in Python until its outermost region ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from amp_core._torch.tracing import calls_are_captured, calls_are_compared
from amp_core.dispatch import kept_operands, region_casts
from amp_core.dispatch.fingerprints import CachedCast, is_cacheable, is_float32_leaf
from amp_core.dispatch.sources import Sources
from amp_core.dispatch.target_dtype import eligible


class CastSource(Protocol):
    """A scope that keeps the casts of some weights."""

    def lookup(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the cast of `weight`, creating it if necessary; None if the scope does not cover it."""


CASTS: dict[torch.dtype, dict[int, CachedCast]] = defaultdict(dict)
"""The casts of all scopes, by dtype and by the weight's ``id``. A scope keeps its weights alive, so no ``id``
is reused while its entry exists."""

sources = Sources[CastSource]()


def replace_weights(args: Sequence[Any], device_type: str) -> Sequence[Any]:
    """Replace weights among a low-precision op's arguments with their casts; torch's kernel casts the rest.

    These are the casts that scopes keep, and those that the kernel itself would keep until the region ends.
    For those it would wait for the lock of torch's cache without letting other threads run Python code. One
    of them may hold that lock and need to: under a `TorchDispatchMode`, casts run Python code.
    """
    dtype = torch.get_autocast_dtype(device_type)
    if dtype is torch.float32:
        return args
    scopes = CASTS[dtype] if sources.active and not _must_cast_anew() else None
    region = region_casts.as_torch(dtype)
    if scopes is None and region is None:
        return args
    return _replaced(args, dtype, device_type, scopes, region)


def _replaced(
    values: Sequence[Any],
    dtype: torch.dtype,
    device_type: str,
    scopes: Mapping[int, CachedCast] | None,
    region: region_casts.AsTorch | None,
) -> list[Any]:
    replaced: list[Any] = []
    for value in values:
        if scopes is not None and (entry := scopes.get(id(value))) is not None and entry.is_fresh(value):
            replaced.append(entry.cast)
        elif (  # the shorter way of `cast_as_torch`, for what a region has cast before
            scopes is None
            and region is not None
            and (kept := region.get(id(value))) is not None
            and value.requires_grad
        ):
            replaced.append(kept[1])
        elif (
            isinstance(value, Tensor)
            and value.dtype is torch.float32  # most are activations
            and value.is_leaf
            and (value.requires_grad or scopes is not None)
            and eligible(value, device_type)
        ):
            cast = None if scopes is None else _from_scopes(value, dtype)
            if cast is None and region is not None:
                cast = region_casts.cast_as_torch(value, dtype, region)
            replaced.append(value if cast is None else cast)
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            replaced.append(_replaced(value, dtype, device_type, scopes, region))
        else:
            replaced.append(value)
    return replaced


def _must_cast_anew() -> bool:
    """Return whether the call that runs now must not use a cast from before.

    A graph would bake in the cast as a constant. Selective checkpointing needs the same ops of a block and of
    its recomputation, casts included, and a scope may keep the cast, or end, in between.
    """
    return calls_are_captured() or calls_are_compared()


def _from_scopes(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    for source in sources.active:
        cast = source.lookup(tensor, dtype)
        if cast is not None:
            return cast
    return None


def kept_cast(tensor: Tensor, dtype: torch.dtype, device_type: str) -> Tensor | None:
    """Return the cast of `tensor` that a scope or this thread's region keeps, made now if need be.

    None if neither keeps it. A region keeps what torch's own kernels would: the cast, to the region's dtype,
    of a float32 leaf that requires grad and is not a view (``at::autocast::cached_cast``, 2.13). Scopes also
    keep casts of frozen weights.

    Args:
        tensor: a tensor eligible for autocast, not yet of `dtype`.
        dtype: the dtype that the op's rule requires.
        device_type: the region's device type.
    """
    if not (tensor.requires_grad or sources.active):  # most are activations in inference
        return None
    cacheable = dtype is torch.get_autocast_dtype(device_type) and is_float32_leaf(tensor)
    if not cacheable or _must_cast_anew():
        return None
    scope_cast = _from_scopes(tensor, dtype) if sources.active and is_cacheable(tensor) else None
    if scope_cast is not None:
        kept_operands.begin(scope_cast)
        return scope_cast
    if tensor.requires_grad and region_casts.region_caches():
        return region_casts.cast_for_rule(tensor, dtype)
    return None
