"""Casts that a thread uses until its outermost region ends, as long as torch keeps its own.

Rules that run in Python keep here what torch's own kernels would keep. Scopes keep here the casts of small
weights that each step changes.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from amp_core._torch import cast_cache
from amp_core._torch.tracing import calls_are_watched
from amp_core.common.cast import to_dtype
from amp_core.common.once import once
from amp_core.dispatch.fingerprints import CachedCast, Fingerprint, cached, fingerprint


class RegionCast(NamedTuple):
    """A cast of a scope, with the fingerprint that its weight had when it was cast.

    It keeps the memory of the small weight, so that no other tensor gets the address: a weak reference takes
    longer to make.
    """

    fingerprint: Fingerprint
    memory: UntypedStorage
    cast: Tensor

    def is_fresh(self, weight: Tensor) -> bool:
        """Return whether `weight` is unchanged, as far as torch can tell."""
        return fingerprint(weight) == self.fingerprint


class _Region:
    """The casts of one thread, by dtype and by the weight's ``id``."""

    def __init__(self) -> None:
        self.of_rules: dict[torch.dtype, dict[int, tuple[Tensor, CachedCast]]] = defaultdict(dict)
        self.of_scopes: dict[torch.dtype, dict[int, RegionCast]] = defaultdict(dict)


class _Local(threading.local):
    def __init__(self) -> None:
        self.region = _Region()
        _regions.append(weakref.ref(self.region, _regions.remove))


_regions: list[weakref.ref[_Region]] = []
"""Those of all threads."""

_local = _Local()


@once
def clear_with_regions() -> None:
    """Drop a thread's casts from now on when its outermost region ends."""
    cast_cache.when_cleared(_clear)


def _clear() -> None:
    for of_rules in _local.region.of_rules.values():
        of_rules.clear()
    for of_scopes in _local.region.of_scopes.values():
        of_scopes.clear()


# Of rules.


def region_caches() -> bool:
    """Return whether torch's own kernels would keep casts now."""
    return torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()


def cast_for_rule(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the cast of `weight` to `dtype`, one for all rules."""
    casts = _local.region.of_rules[dtype]
    entry = casts.get(id(weight))
    if entry is not None and entry[0] is weight and entry[1].is_fresh(weight):
        return entry[1].cast
    clear_with_regions()
    state = fingerprint(weight)
    with torch.enable_grad():  # a first use under no_grad must not detach later uses from the graph
        cast = to_dtype(weight, dtype)
    casts[id(weight)] = weight, cached(weight, state, cast)
    return cast


# Of scopes.


def from_scopes(dtype: torch.dtype) -> Mapping[int, RegionCast]:
    """Return what scopes keep for this thread's region, by the weight's ``id``.

    That is nothing while a mode watches: selective checkpointing compares the ops of a block, casts included,
    with those of its recomputation, which runs after the region.
    """
    return {} if calls_are_watched() else _local.region.of_scopes[dtype]


def keep(weight: Tensor, state: Fingerprint, cast: Tensor) -> None:
    """Keep the cast that a scope has made of `weight` when its fingerprint was `state`."""
    _local.region.of_scopes[cast.dtype][id(weight)] = RegionCast(state, weight.untyped_storage(), cast)


def take(weight: Tensor, state: Fingerprint, dtype: torch.dtype) -> Tensor | None:
    """Take the cast of `weight`, if it is fresh, from this thread's region: its scope keeps it for longer."""
    entry = _local.region.of_scopes[dtype].pop(id(weight), None)
    return entry.cast if entry is not None and entry.fingerprint == state else None


def of_all_threads() -> Iterator[dict[int, RegionCast]]:
    """Yield what scopes keep for the regions of all threads, by the weight's ``id``."""
    for ref in _regions.copy():
        region = ref()
        if region is not None:
            yield from region.of_scopes.copy().values()
