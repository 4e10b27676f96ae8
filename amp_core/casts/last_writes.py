"""Who wrote to stored weights last: what is kept beside a weight belongs to the value of the last step."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor
from torch.optim import Optimizer

from amp_core._torch.tensors import WeakStorage, identity_of, is_freed, version_of, weak_memory
from amp_core._torch.tracing import outside_graphs
from amp_core.casts.unseen_writes import is_traced_and_seen, may_write_unseen
from amp_core.common.locks import new_lock
from amp_core.common.optimizers import after_every_step, parameters_of
from amp_core.dispatch.fingerprints import address_of

Versions = list[tuple[int, int, int]]

_clock = itertools.count()
_all: dict[int, weakref.ref[LastWrites]] = {}  # by the id of the optimizer, which each keeps alive
_writers: dict[int, dict[weakref.ref[LastWrites], int]] = {}
"""For each parameter, by its ``id``, who wrote to it, and when last."""
_lock = new_lock()


class LastWrites:
    """The last writes of one optimizer to the weights that are stored for it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        # When, and what was there then. Keeps the parameter alive, so that no other gets its id.
        self._writes: dict[Tensor, tuple[int, Versions, WeakStorage]] = {}
        self._converted: dict[Tensor, tuple[int, int]] = {}  # before a first step, and versions then
        self._key = key = id(optimizer)
        self._ref = _all[key] = weakref.ref(self, lambda ref: _all.get(key) is ref and _all.pop(key))
        after_every_step(_after_step)

    def note(self, param: Tensor, kept: Tensor | None) -> None:
        """Take note that the optimizer has just written to `param`, and to what is kept beside it."""
        with _lock:
            if param not in self._writes:
                _drop_gone()
            now = next(_clock)
            self._writes[param] = now, _versions(param, kept), weak_memory(param)
            _writers.setdefault(id(param), {})[self._ref] = now
        self._converted.pop(param, None)

    def note_converted(self, param: Tensor) -> None:
        """Take note that `param` has just been rounded to bfloat16, before any step."""
        self._converted[param] = identity_of(param), version_of(param)

    def take_rewritten(self) -> list[Tensor]:
        """Return the parameters that were written to between their conversion and a step, each only once."""
        rewritten = [
            param
            for param, (identity, version) in self._converted.items()
            if identity_of(param) == identity and version_of(param) != version  # a swapped one is moved
        ]
        for param in rewritten:
            del self._converted[param]
        return rewritten

    def is_last(self, param: Tensor, kept: Tensor | None) -> bool:
        """Return whether nothing is known to have written to these since."""
        if param not in self._writes:
            return False
        _, versions, memory = self._writes[param]
        # Other memory may have the address of freed memory.
        return versions == _versions(param, kept) and not is_freed(memory.cdata)

    def forget_others(self, stepped: Collection[Tensor]) -> None:
        """Forget all parameters but those in `stepped`."""
        self.forget(self._writes.keys() - stepped)
        for param in self._converted.keys() - stepped:
            del self._converted[param]

    def forget(self, params: Iterable[Tensor]) -> None:
        """Forget `params`."""
        with _lock:
            for param in params:
                if self._writes.pop(param, None) is not None:
                    _writers.get(id(param), {}).pop(self._ref, None)

    def clear(self) -> None:
        """Forget all."""
        self.forget([*self._writes])
        self._converted.clear()

    def end(self) -> None:
        """Forget all, for good."""
        if _all.get(self._key) is self._ref:  # else the optimizer is stored anew
            del _all[self._key]
        self.clear()

    def refuse_two(self, names: Mapping[Tensor, str]) -> None:
        """Raise RuntimeError if weights were stepped since by another optimizer that they are stored for."""
        for param, (when, *_) in [*self._writes.items()] if len(_all) > 1 else ():
            others = [*_writers.get(id(param), {}).items()]
            if len(others) > 1 and any(last > when and ref() is not None for ref, last in others):
                raise RuntimeError(
                    f"{names.get(param)!r} is stored for two optimizers, which step it in turn: each would "
                    f"add what it has kept to the weight of the other. Let one of them step it, or name it "
                    f"in keep= of both."
                )


def _drop_gone() -> None:
    """Forget those of `_writers` that are gone, when half of them may be: it takes no time on average."""
    global _many  # noqa: PLW0603
    if len(_writers) < _many:
        return
    for key, writers in [*_writers.items()]:
        for ref in [ref for ref in writers if ref() is None]:
            del writers[ref]
        if not writers:
            del _writers[key]
    _many = 2 * len(_writers) + 64


_many = 0


def _after_step(optimizer: Optimizer) -> None:
    """Forget weights that a step of another optimizer may have written without moving their versions."""
    if not is_traced_and_seen(optimizer) and _all and may_write_unseen(optimizer):
        _forget_unseen(optimizer)


@outside_graphs
def _forget_unseen(optimizer: Optimizer) -> None:
    if id(optimizer) in _all:
        return
    for param in parameters_of(optimizer):
        for ref in [*_writers.get(id(param), ())]:
            each = ref()
            if each is not None:
                each.forget([param])


def _versions(param: Tensor, kept: Tensor | None) -> Versions:
    """Return what differs once one was written to, swapped, replaced, or given other memory."""
    both = (param,) if kept is None else (param, kept)
    return [(identity_of(each), version_of(each), address_of(each)) for each in both]
