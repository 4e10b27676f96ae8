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
from amp_core.common.optimizers import after_every_step, parameters_of
from amp_core.dispatch.fingerprints import address_of

Versions = list[tuple[int, int, int]]

_clock = itertools.count()
_all: dict[int, weakref.ref[LastWrites]] = {}  # not a WeakSet, which other threads must not change meanwhile


class LastWrites:
    """The last writes of one optimizer to the weights that are stored for it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._writes: dict[Tensor, tuple[int, Versions, WeakStorage]] = {}  # when, and what was there then
        self._converted: dict[Tensor, tuple[int, int]] = {}  # before a first step, and versions then
        self._key = key = next(_clock)
        _all[key] = weakref.ref(self, lambda _: _all.pop(key, None))
        after_every_step(_after_step)

    def note(self, param: Tensor, kept: Tensor | None) -> None:
        """Take note that the optimizer has just written to `param`, and to what is kept beside it."""
        self._writes[param] = next(_clock), _versions(param, kept), weak_memory(param)
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
        for known in (self._writes, self._converted):
            for param in known.keys() - stepped:
                del known[param]

    def forget(self, params: Iterable[Tensor]) -> None:
        """Forget `params`."""
        for param in params:
            self._writes.pop(param, None)

    def clear(self) -> None:
        """Forget all."""
        self._writes.clear()
        self._converted.clear()

    def end(self) -> None:
        """Forget all, for good."""
        _all.pop(self._key, None)
        self.clear()

    def refuse_two(self, names: Mapping[Tensor, str]) -> None:
        """Raise RuntimeError if weights were stepped since by another optimizer that they are stored for."""
        for other in _every() if len(_all) > 1 else ():
            theirs = other._writes.copy()
            for param, write in self._writes.items():
                if param in theirs and write < theirs[param]:
                    raise RuntimeError(
                        f"{names.get(param)!r} is stored for two optimizers, which step it in turn: each "
                        f"would add what it has kept to the weight of the other. Let one of them step it, or "
                        f"name it in keep= of both."
                    )


def _every() -> list[LastWrites]:
    return [each for ref in [*_all.values()] if (each := ref()) is not None]


def _after_step(optimizer: Optimizer) -> None:
    """Forget weights that a step of another optimizer may have written without moving their versions."""
    if not is_traced_and_seen(optimizer) and _all and may_write_unseen(optimizer):
        _forget_unseen(optimizer)


@outside_graphs
def _forget_unseen(optimizer: Optimizer) -> None:
    every = _every()
    if all(each.optimizer is not optimizer for each in every):
        for each in every:
            each.forget(parameters_of(optimizer))


def _versions(param: Tensor, kept: Tensor | None) -> Versions:
    """Return what differs once one was written to, swapped, replaced, or given other memory."""
    both = (param,) if kept is None else (param, kept)
    return [(identity_of(each), version_of(each), address_of(each)) for each in both]
