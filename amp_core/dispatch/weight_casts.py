"""Look up casts of weights, for every op under any rule or scope.

There are two caches. A scope such as `cached_casts` keeps the casts of its model until a weight changes, for
all threads. A thread keeps those of rules that run in Python until its outermost region ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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
    """Replace weights among a low-precision op's arguments with the casts that scopes keep.

    torch's own kernel casts the rest.
    """
    if not sources.active or _must_cast_anew():
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
