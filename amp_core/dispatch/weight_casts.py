"""Casts of weights: the one lookup of every op, whichever rule or scope it runs under.

Two stores answer it. A scope such as `cached_casts` keeps the casts of its model until a weight changes, for
all threads. A region whose rules run in Python keeps the casts that torch's own kernels would keep, for its
thread, until the outermost region ends.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from amp_core._torch import internals as _torch
from amp_core.dispatch.target_dtype import eligible

_Fingerprint = tuple[object, ...]


class CachedCast(NamedTuple):
    """A cast, the state of its weight when it was made, and the memory that the weight was in."""

    fingerprint: _Fingerprint
    memory: _torch.WeakStorage
    cast: Tensor

    def is_fresh(self, weight: Tensor) -> bool:
        """Whether `weight` is unchanged, as far as torch can tell."""
        # Freed memory comes back for other tensors, at the same address.
        return fingerprint(weight) == self.fingerprint and not _torch.is_freed(self.memory.cdata)


def fingerprint(weight: Tensor) -> _Fingerprint:
    """Return what changes when `weight` is written to, replaced, moved, frozen or hooked."""
    return (
        weight._version,
        weight.data_ptr(),
        weight.shape,
        weight.stride(),
        weight.requires_grad,
        _torch.has_gradient_hooks(weight),
    )


def cached(weight: Tensor, state: _Fingerprint, cast: Tensor) -> CachedCast:
    """Return the entry for `cast`, made of `weight` when its fingerprint was `state`."""
    memory = _torch.WeakStorage(weight.untyped_storage())  # type: ignore[no-untyped-call]
    return CachedCast(state, memory, cast)


# What scopes offer.


class CastSource(Protocol):
    """A scope that keeps the casts of some weights."""

    def lookup(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the cast of `weight`, made if need be; None for a weight that is not the scope's."""


CASTS: dict[torch.dtype, dict[int, CachedCast]] = defaultdict(dict)
"""The casts of all scopes, by dtype and by the weight's ``id``. A scope keeps its weights alive, so that no
``id`` is reused while its entry stands."""

WEIGHT_OPS = frozenset(
    f"aten::{op}"
    for op in (
        "addbmm.default",
        "addmm.default",
        "baddbmm.default",
        "bmm.default",
        "conv1d.default",
        "conv2d.default",
        "conv3d.default",
        "conv_tbc.default",
        "conv_transpose1d.default",
        "conv_transpose2d.input",
        "conv_transpose3d.input",
        "convolution.default",
        "linear.default",
        "matmul.default",
        "mm.default",
        "prelu.default",
    )
)
"""The ops that take weights, of those that torch runs in the lower precision on every device."""

_sources: tuple[CastSource, ...] = ()
_lock = threading.Lock()


def register(source: CastSource) -> Callable[[], None]:
    """Ask `source` for casts from now on; return the function that ends that."""
    global _sources  # noqa: PLW0603  # replaced whole, so that ops read it without a lock
    with _lock:
        _sources = (*_sources, source)

    def unregister() -> None:
        global _sources  # noqa: PLW0603
        with _lock:
            _sources = tuple(s for s in _sources if s is not source)

    return unregister


def replace_weights(args: Sequence[Any], device_type: str) -> Sequence[Any]:
    """Return the arguments of a low-precision op with the casts that scopes keep in place of weights.

    All else is left for torch's own kernel to cast. Nothing is replaced while the call is captured or
    transformed: a graph would hold the cast as a constant.
    """
    if not _sources or _torch.calls_are_captured():
        return args
    dtype = torch.get_autocast_dtype(device_type)
    casts = CASTS[dtype]
    replaced = []
    for arg in args:
        entry = casts.get(id(arg))
        if entry is not None and entry.is_fresh(arg):
            replaced.append(entry.cast)
        elif isinstance(arg, Tensor) and arg.is_leaf and eligible(arg, device_type):
            cast = _from_scopes(arg, dtype)
            replaced.append(arg if cast is None else cast)
        else:
            replaced.append(arg)
    return replaced


def _from_scopes(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    for source in _sources:
        cast = source.lookup(tensor, dtype)
        if cast is not None:
            return cast
    return None


# What a region keeps.


class _RegionCasts(threading.local):
    def __init__(self) -> None:
        self.casts: dict[tuple[int, torch.dtype], tuple[Tensor, CachedCast]] = {}


_region = _RegionCasts()


# `Tensor.to` is slower: it has many signatures to try.
_METHODS: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: Tensor.float,
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
}


def cast(tensor: Tensor, dtype: torch.dtype, device_type: str | None) -> Tensor:
    """Cast `tensor` to `dtype`, from a cache where torch's own kernels would use theirs.

    They do for a float32 leaf that requires grad, is no view and goes to the dtype of the region
    (``at::autocast::cached_cast``, 2.13). Scopes keep casts of frozen weights too.

    Args:
        tensor: eligible for autocast, and not of `dtype`.
        dtype: the dtype that the op's rule asks for.
        device_type: of the region; None casts afresh, for an op that writes to the result.
    """
    if device_type is not None and (tensor.requires_grad or _sources):
        kept = _kept(tensor, dtype, device_type)
        if kept is not None:
            return kept
    method = _METHODS.get(dtype)
    return tensor.to(dtype) if method is None else method(tensor)


def is_cacheable(weight: Tensor) -> bool:
    """Whether a cast of `weight` may be kept: a plain float32 leaf, whose changes torch counts."""
    return (
        weight.dtype is torch.float32
        and type(weight) in (Parameter, Tensor)
        and weight.is_leaf
        and weight.layout is torch.strided
        and not (weight._is_view() or weight.is_nested or weight.is_inference())
    )


def _kept(tensor: Tensor, dtype: torch.dtype, device_type: str) -> Tensor | None:
    wanted = dtype is torch.get_autocast_dtype(device_type) and is_cacheable(tensor)
    if not wanted or _torch.calls_are_captured():
        return None
    of_scope = _from_scopes(tensor, dtype)
    if of_scope is not None or not tensor.requires_grad or not _region_keeps_casts():
        return of_scope
    return _kept_by_region(tensor, dtype)


def _region_keeps_casts() -> bool:
    return torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()


def _kept_by_region(weight: Tensor, dtype: torch.dtype) -> Tensor:
    kept = _region.casts.get((id(weight), dtype))
    if kept is not None and kept[0] is weight and kept[1].is_fresh(weight):
        return kept[1].cast
    state = fingerprint(weight)
    with torch.enable_grad():  # a first use under no_grad must not cut later ones off from the graph
        made = weight.to(dtype)
    _region.casts[id(weight), dtype] = weight, cached(weight, state, made)
    return made


def clear() -> None:
    """Drop the casts that the regions of this thread keep."""
    _region.casts.clear()
