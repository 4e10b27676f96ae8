"""Tell whether a weight has changed since it was cast."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from amp_core._torch.autograd import has_gradient_hooks
from amp_core._torch.tensors import (
    WeakStorage,
    identity_of,
    is_dtensor,
    is_freed,
    is_tensor_view,
    is_wrapper,
    part_of,
    version_of,
    weak_memory,
)

Fingerprint = tuple[object, ...]

_PLAIN = (Parameter, Tensor)


def fingerprint(weight: Tensor) -> Fingerprint:
    """Return a value that changes when `weight` is written to, replaced, moved, frozen or hooked."""
    part = weight if type(weight) in _PLAIN else part_of(weight)
    return (
        identity_of(weight),
        _version(weight),
        0 if part is weight else _version(part),  # the program may write to a DTensor's part, too
        0 if type(part) not in _PLAIN and is_wrapper(part) else part.data_ptr(),
        part.shape,
        part.stride(),
        weight.requires_grad,
        has_gradient_hooks(weight),
    )


def address_of(weight: Tensor) -> int:
    """Return where the memory of `weight` begins; 0 if it has none, or none that it tells."""
    part = part_of(weight)
    return 0 if type(part) not in _PLAIN and is_wrapper(part) else part.data_ptr()


def _version(tensor: Tensor) -> object:
    try:
        return version_of(tensor)
    except RuntimeError:  # an inference tensor, swapped in for a weight: its writes are not counted
        return object()


def is_cacheable(weight: Tensor) -> bool:
    """Return whether a cast of `weight` may be cached: a float32 leaf, plain or a DTensor, with a version."""
    return (type(weight) in _PLAIN or is_dtensor(weight)) and is_float32_leaf(weight)


def is_float32_leaf(weight: Tensor) -> bool:
    """Return whether `weight`, of any type, is one whose casts torch's regions keep if it requires grad."""
    return (
        weight.dtype is torch.float32
        and weight.is_leaf
        and weight.layout is torch.strided
        and not (is_tensor_view(weight) or weight.is_nested or weight.is_inference())
    )


class CachedCast(NamedTuple):
    """A cast, with the fingerprint and the storage that its weight had when it was cast.

    A backward pass through a cast that is `alone` calls the hooks that its weight has then.
    """

    fingerprint: Fingerprint
    memory: WeakStorage
    cast: Tensor
    alone: bool = False

    def is_only_hooked(self, weight: Tensor) -> bool:
        """Return whether `weight` is unchanged but for its gradient hooks."""
        return fingerprint(weight)[:-1] == self.fingerprint[:-1] and not is_freed(self.memory.cdata)

    def is_fresh(self, weight: Tensor) -> bool:
        """Return whether `weight` is unchanged, as far as torch can tell."""
        if self.alone:
            return self.is_only_hooked(weight)
        # Another tensor may reuse freed memory at the same address.
        return fingerprint(weight) == self.fingerprint and not is_freed(self.memory.cdata)


def cached(weight: Tensor, state: Fingerprint, cast: Tensor, *, alone: bool = False) -> CachedCast:
    """Return the cache entry for a cast of `weight` made when its fingerprint was `state`."""
    return CachedCast(state, weak_memory(weight), cast, alone)
