"""Casts of weights that live until the weight changes."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from amp_core._torch import internals as _torch
from amp_core.casts.bulk import cast_weights
from amp_core.casts.memory import KeptMemory
from amp_core.errors import StaleCastError
from amp_core.kernels import Kernels
from amp_core.plugin import get_backend

MakeCasts = Callable[[Sequence[Tensor], torch.dtype, Kernels, KeptMemory], list[Tensor]]
"""Casts weights of one device that agree in ``requires_grad``."""


class Entry(NamedTuple):
    """A cast, what its weight looked like before it was made, and the memory that the weight was in."""

    look: tuple[object, ...]
    memory: _torch.WeakStorage
    cast: Tensor

    def is_fresh(self, weight: Tensor) -> bool:
        """Whether `weight` is as it was, as far as torch can tell. Asked for every weight of every op."""
        # Memory that was freed comes back for other tensors, under the same address.
        return _look(weight) == self.look and not _torch.is_freed(self.memory.cdata)


def _look(weight: Tensor) -> tuple[object, ...]:
    return (
        weight._version,
        weight.data_ptr(),
        weight.shape,
        weight.stride(),
        weight.requires_grad,
        _torch.has_gradient_hooks(weight),
    )


@dataclass
class _Slot:
    """One weight of the model, and the dtypes that ops have asked for it in."""

    weight: Tensor
    name: str
    wanted: set[torch.dtype] = field(default_factory=set)


CASTS: dict[torch.dtype, dict[int, Entry]] = defaultdict(dict)
"""The live casts of all scopes, by dtype and by the weight's ``id``: what ops look at. A scope holds
its weights, so that no id is used again while its entry stands."""


class WeightCache:
    """The casts of one model's weights.

    A cast is used only while the weight's version counter, memory, shape, strides and ``requires_grad``
    are what they were when it was made, and gradient hooks are there or not as they were. When one is
    stale, all stale casts that ops have asked for before are made again in one call.
    """

    def __init__(
        self,
        named_weights: Callable[[], Iterable[tuple[str, Tensor]]],
        make: MakeCasts = cast_weights,
        *,
        debug: bool = False,
    ) -> None:
        self._named_weights = named_weights
        self._make = make
        self.memory = KeptMemory()
        self._slots: dict[int, _Slot] = {}
        self._strangers: dict[int, weakref.ref[Tensor]] = {}
        self._lock = threading.Lock()
        self.debug = debug
        self._adopt()

    def lookup(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the cast of `weight` to `dtype`, made if need be; ``None`` if it is not of this model."""
        slot = self._slots.get(id(weight)) or self._adopted(weight)
        if slot is None:
            return None
        entry = CASTS[dtype].get(id(weight))
        if entry is None or not entry.is_fresh(weight):
            entry = self._cast_stale(slot, dtype)
        if self.debug:
            _compare(slot, entry)
        return entry.cast

    def _cast_stale(self, slot: _Slot, dtype: torch.dtype) -> Entry:
        entries = CASTS[dtype]
        with self._lock:
            slot.wanted.add(dtype)
            groups: dict[tuple[torch.device, bool], list[Tensor]] = defaultdict(list)
            for weight in [s.weight for s in self._slots.values() if dtype in s.wanted]:
                if weight.data_ptr() == 0 and weight.numel():
                    continue  # its memory was taken away for the time being
                entry = entries.get(id(weight))
                if entry is None or not entry.is_fresh(weight):
                    entries.pop(id(weight), None)  # free the old cast before the new one is made
                    groups[weight.device, weight.requires_grad].append(weight)
            for (device, _), weights in groups.items():
                kernels = get_backend(device.type).kernels()
                looks = list(map(_look, weights))
                casts = self._make(weights, dtype, kernels, self.memory)
                for weight, look, cast in zip(weights, looks, casts, strict=True):
                    memory = _torch.WeakStorage(weight.untyped_storage())  # type: ignore[no-untyped-call]
                    entries[id(weight)] = Entry(look, memory, cast)
            return entries[id(slot.weight)]

    def invalidate(self, weights: Iterable[Tensor] | None = None) -> None:
        """Drop the casts of `weights`, or all."""
        with self._lock:
            keys = self._slots.keys() if weights is None else self._slots.keys() & {id(w) for w in weights}
            _drop(keys)

    def _adopted(self, weight: Tensor) -> _Slot | None:
        """Look again at the model for a parameter that was put in the place of another."""
        if not isinstance(weight, Parameter):
            return None
        known = self._strangers.get(id(weight))
        if known is not None and known() is weight:
            return None
        with self._lock:
            self._adopt()
            slot = self._slots.get(id(weight))
            if slot is None:
                self._strangers[id(weight)] = weakref.ref(weight)
            return slot

    def _adopt(self) -> None:
        present = {id(w): (name, w) for name, w in self._named_weights() if _cacheable(w)}
        _drop(self._slots.keys() - present.keys())
        self._slots = {
            key: self._slots.get(key) or _Slot(weight, name) for key, (name, weight) in present.items()
        }
        self._strangers = {key: ref for key, ref in self._strangers.items() if ref() is not None}

    def keys(self) -> Set[int]:
        """Return the ``id`` of each weight."""
        return self._slots.keys()

    def devices(self) -> set[torch.device]:
        """Return the devices that the weights are on."""
        return {slot.weight.device for slot in self._slots.values()}

    def casts(self) -> list[Tensor]:
        """Return the casts that are live."""
        return [entries[key].cast for entries in CASTS.values() for key in self.keys() & entries.keys()]


def _drop(keys: Iterable[int]) -> None:
    for key in keys:
        for entries in CASTS.values():
            entries.pop(key, None)


def _cacheable(weight: Tensor) -> bool:
    # torch's own condition (float32 leaf), less its requires_grad; an inference tensor has no version.
    return weight.dtype is torch.float32 and weight.is_leaf and not weight.is_inference()


def _compare(slot: _Slot, entry: Entry) -> None:
    expected = slot.weight.detach().to(entry.cast.dtype)
    if not torch.equal(expected.nan_to_num(), entry.cast.detach().nan_to_num()):
        raise StaleCastError(
            f"The {entry.cast.dtype} cast of weight {slot.name!r} no longer agrees with the weight: "
            f"something wrote to it in a way that torch does not count, as through `.data` or NumPy. Call "
            f"invalidate() on the cached_casts handle after such a write."
        )
