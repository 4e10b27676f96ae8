"""Caches casts of weights until the weight changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.nn import Module, Parameter

from amp_core._torch.tensors import WeakStorage, identity_of, is_dtensor, is_freed, part_of, weak_memory
from amp_core.casts.bulk import cast_alone, looks_for_hooks
from amp_core.casts.memory import KeptMemory
from amp_core.common.locks import new_lock
from amp_core.dispatch import kept_operands
from amp_core.dispatch.fingerprints import CachedCast, address_of, cached, fingerprint, is_cacheable
from amp_core.dispatch.weight_casts import CASTS
from amp_core.errors import StaleCastError
from amp_core.kernels import Kernels
from amp_core.plugin import get_backend

MakeCasts = Callable[[Sequence[Tensor], torch.dtype, Kernels, KeptMemory], list[Tensor]]
"""Casts weights that share a device and ``requires_grad``."""


@dataclass
class _Slot:
    """One weight of the model, and the dtypes that ops have requested."""

    weight: Tensor
    name: str
    dtypes: set[torch.dtype] = field(default_factory=set)


class WeightCache:
    """The casts of one model's weights.

    A cast is valid only while the weight's version counter, memory, shape, strides and ``requires_grad``, and
    in a bucket the presence of gradient hooks, are unchanged. When one cast is stale, all stale casts that
    ops have requested before are renewed in one call. The small weights of a CPU are cast one by one, as ops
    need them: nothing is launched, and the cast is still in the CPU's caches when the op reads it.
    """

    def __init__(
        self,
        named_weights: Callable[[], Iterable[tuple[str, Tensor]]],
        make: MakeCasts,
        is_small: Callable[[Tensor], bool],
        *,
        debug: bool,
    ) -> None:
        self._named_weights = named_weights
        self._make, self._is_small = make, is_small
        self.memory = KeptMemory()
        self.is_kept = True  # the scope sets it to False when it stops: threads may still be casting
        self.is_outdated = False
        self.invalidations = 0
        self._slots: dict[int, _Slot] = {}
        self._alike: dict[int, set[int]] = {}  # see _with_one_memory
        # Parameters of other models. A weak reference to a tensor would forbid torch.utils.swap_tensors.
        self._foreign: dict[int, tuple[int, WeakStorage]] = {}
        self._unsure: dict[int, tuple[int, WeakStorage]] = {}  # not looked for yet
        self._pause = 0  # so many unknown parameters are not looked for
        self._many_foreign = 0  # with as many, look which are gone
        self._lock = new_lock()  # a signal handler may use the model, too
        # In debug mode, bypass the table that ops read directly, so that every use is checked.
        self._casts = defaultdict(dict) if debug else CASTS
        self.debug = debug
        self._update_slots()

    def lookup(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the cast of `weight` to `dtype`, creating it if necessary.

        Returns None for a weight of another model, and for one whose memory a wrapper has freed.
        """
        slot = self._slots.get(id(weight)) or self._slot_of_new(weight)
        if slot is None:
            return None
        entry = self._casts[dtype].get(id(weight))
        if entry is None or not entry.is_fresh(weight):
            alone = self._is_cast_alone(weight)
            entry = self._cast_alone(weight, dtype) if alone else self._cast_stale(slot, dtype)
            if not self.is_kept:  # the scope has ended meanwhile
                self.invalidate()
        if entry is not None and self.debug:
            _check(slot, entry.cast)
        return None if entry is None else entry.cast

    def _is_cast_alone(self, weight: Tensor) -> bool:
        # Kernels know no tangents of forward-mode AD; torch's cast has them.
        return self._is_small(weight) or unpack_dual(weight).tangent is not None  # type: ignore[no-untyped-call]

    def _cast_alone(self, weight: Tensor, dtype: torch.dtype) -> CachedCast | None:
        if _has_no_memory(weight):
            return None
        before, state = self.invalidations, fingerprint(weight)
        entry = cached(weight, state, cast_alone(weight, dtype), alone=True)
        with self._lock:
            if before == self.invalidations and self.is_kept:  # no other thread has stepped meanwhile
                self._casts[dtype][id(weight)] = entry
        return entry

    def _cast_stale(self, slot: _Slot, dtype: torch.dtype) -> CachedCast | None:
        entries = self._casts[dtype]
        with self._lock:
            current = entries.get(id(slot.weight))
            if current is not None and current.is_fresh(slot.weight):
                return current  # another thread has just renewed it
            # At its first use a weight is cast without the others, which would each be looked at each time.
            is_first = dtype not in slot.dtypes
            slot.dtypes.add(dtype)
            slots = [slot] if is_first else [s for s in self._slots.values() if dtype in s.dtypes]
            new_entries = self._cast_together([s.weight for s in slots], dtype)
            entries.update(new_entries)
            return new_entries.get(id(slot.weight))

    def _cast_together(self, candidates: Sequence[Tensor], dtype: torch.dtype) -> dict[int, CachedCast]:
        entries = self._casts[dtype]
        groups: dict[tuple[torch.device, bool, bool], list[Tensor]] = defaultdict(list)
        new_entries: dict[int, CachedCast] = {}
        for weight in candidates:
            if self._is_cast_alone(weight) or _has_no_memory(weight):
                continue
            entry = entries.get(id(weight))
            if entry is not None and looks_for_hooks(entry.cast) and entry.is_only_hooked(weight):
                # A graph may need the cast: to renew it would write to it.
                new_entries[id(weight)] = cached(weight, fingerprint(weight), entry.cast)
            elif entry is None or not entry.is_fresh(weight):
                entries.pop(id(weight), None)  # free the old cast before allocating the new one
                groups[weight.device, weight.requires_grad, is_dtensor(weight)].append(weight)
        for (device, *_), weights in groups.items():
            kernels = get_backend(device.type).kernels()
            states = list(map(fingerprint, weights))
            casts = self._make(weights, dtype, kernels, self.memory)
            for weight, state, cast in zip(weights, states, casts, strict=True):
                kept_operands.end(cast)  # it may be an earlier one, rewritten
                new_entries[id(weight)] = cached(weight, state, cast)
        return new_entries

    def invalidate(self, weights: Iterable[Tensor] | None = None) -> None:
        """Drop the casts of `weights`, or all casts."""
        with self._lock:
            self.invalidations += 1
            keys = self._slots.keys() if weights is None else self._slots.keys() & {id(w) for w in weights}
            self._drop({*keys}.union(*[self._alike[key] for key in keys & self._alike.keys()]))

    def _drop(self, keys: Set[int]) -> None:
        for entries in list(self._casts.values()):
            for key in keys if entries else ():
                entry = entries.pop(key, None)
                if entry is not None:
                    kept_operands.end(entry.cast)

    def _slot_of_new(self, weight: Tensor) -> _Slot | None:
        """Return a slot for an unknown parameter if it has replaced one of the model's."""
        if not (isinstance(weight, Parameter) and is_cacheable(weight)):
            return None
        known = self._foreign.get(id(weight))
        if known is not None and known[0] == identity_of(weight) and not is_freed(known[1].cdata):
            return None
        with self._lock:
            self._unsure[id(weight)] = identity_of(weight), weak_memory(weight)
            if self._pause and not self.is_outdated:
                self._pause -= 1
                return None
            self._update_slots()
            slot = self._slots.get(id(weight))
            # After a search in vain, an eighth as many parameters wait for the next, so that those of another
            # model take linear time.
            self._pause = len(self._slots) // 8 if slot is None else 0
            self._foreign.update(self._unsure)
            self._unsure.clear()
            return slot

    def look_again(self, part: Tensor | Module, *, of_model: bool) -> None:
        """Take note that a parameter or a module has become part of a module."""
        self.is_outdated = self.is_outdated or of_model
        if self._foreign:
            with self._lock:
                for weight in [part] if isinstance(part, Tensor) else part.parameters():
                    self._foreign.pop(id(weight), None)

    def _update_slots(self) -> None:
        self.is_outdated = False  # first: a part may be added on the next lines
        present = {id(w): (name, w) for name, w in self._named_weights() if is_cacheable(w)}
        self._drop(self._slots.keys() - present.keys())
        self._slots = {
            key: self._slots.get(key) or _Slot(weight, name) for key, (name, weight) in present.items()
        }
        self._alike = _with_one_memory([slot.weight for slot in self._slots.values()])
        if len(self._foreign) >= self._many_foreign:
            self._foreign = {key: seen for key, seen in self._foreign.items() if not is_freed(seen[1].cdata)}
            self._many_foreign = 2 * len(self._foreign) + 8

    def keys(self) -> Set[int]:
        """Return the ``id`` of each weight."""
        return self._slots.keys()

    def weights(self) -> list[Tensor]:
        """Return the weights of the model."""
        if self.is_outdated:
            with self._lock:
                self._update_slots()
        return [slot.weight for slot in self._slots.values()]

    def has_any(self, weights: Iterable[Tensor]) -> bool:
        """Return whether one of `weights` is part of the model."""
        return any(id(weight) in self._slots for weight in weights)

    def devices(self) -> set[torch.device]:
        """Return the devices that the weights are on."""
        return {slot.weight.device for slot in self._slots.values()}

    def casts(self) -> list[Tensor]:
        """Return the live casts."""
        return [
            e.cast
            for entries in list(self._casts.values())
            for key in self.keys()
            if (e := entries.get(key)) is not None
        ]


def _with_one_memory(weights: Iterable[Tensor]) -> dict[int, set[int]]:
    """Return the ``id`` of all weights with the memory of one, by its own, where there are several.

    ``load_state_dict(assign=True)`` makes two parameters of a tied one.
    """
    keys: dict[int, set[int]] = defaultdict(set)
    for weight in weights:
        keys[address_of(weight)].add(id(weight))
    keys.pop(0, None)
    return {key: alike for alike in keys.values() if len(alike) > 1 for key in alike}


def _has_no_memory(weight: Tensor) -> bool:
    """Return whether `weight` is on the meta device, or its memory is freed for now."""
    part = part_of(weight)
    return part.data_ptr() == 0 and part.numel() > 0


def _check(slot: _Slot, cast: Tensor) -> None:
    expected = part_of(slot.weight).detach().to(cast.dtype)
    if not torch.equal(expected.nan_to_num(), part_of(cast).detach().nan_to_num()):
        raise StaleCastError(
            f"The {cast.dtype} cast of weight {slot.name!r} no longer agrees with the weight: "
            f"something wrote to the weight without changing its version counter, such as through `.data` or "
            f"NumPy. Call invalidate() on the cached_casts handle after such a write."
        )
