"""Who wrote to stored weights last: what is kept beside a weight belongs to the value of the last step."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor
from torch.optim import Optimizer

from amp_core._torch.tensors import identity_of, version_of
from amp_core.casts.unseen_writes import may_write_unseen
from amp_core.common.optimizers import after_every_step, parameters_of
from amp_core.dispatch.fingerprints import address_of

Versions = list[tuple[int, int, int]]

_all: weakref.WeakSet[LastWrites] = weakref.WeakSet()
_clock = itertools.count()


class LastWrites:
    """The last writes of one optimizer to the weights that are stored for it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._writes: dict[Tensor, tuple[int, Versions]] = {}  # when, and the versions afterwards
        _all.add(self)
        after_every_step(_forget_unseen)

    def note(self, param: Tensor, kept: Tensor | None) -> None:
        """Take note that the optimizer has just written to `param`, and to what is kept beside it."""
        self._writes[param] = next(_clock), _versions(param, kept)

    def is_last(self, param: Tensor, kept: Tensor | None) -> bool:
        """Return whether nothing is known to have written to these since."""
        return param in self._writes and self._writes[param][1] == _versions(param, kept)

    def forget_others(self, stepped: Collection[Tensor]) -> None:
        """Forget all parameters but those in `stepped`."""
        for param in self._writes.keys() - stepped:
            del self._writes[param]

    def forget(self, params: Iterable[Tensor]) -> None:
        """Forget `params`."""
        for param in params:
            self._writes.pop(param, None)

    def clear(self) -> None:
        """Forget all."""
        self._writes.clear()

    def end(self) -> None:
        """Forget all, for good."""
        _all.discard(self)
        self.clear()

    def refuse_two(self, names: Mapping[Tensor, str]) -> None:
        """Raise RuntimeError if weights were stepped since by another optimizer that they are stored for."""
        for other in tuple(_all) if len(_all) > 1 else ():
            for param in self._writes.keys() & other._writes.keys():
                if self._writes[param] < other._writes[param]:
                    raise RuntimeError(
                        f"{names.get(param)!r} is stored for two optimizers, which step it in turn: each "
                        f"would add what it has kept to the weight of the other. Let one of them step it, or "
                        f"name it in keep= of both."
                    )


def _forget_unseen(optimizer: Optimizer) -> None:
    """Forget weights that a step of another optimizer may have written without moving their versions."""
    if _all and may_write_unseen(optimizer):
        every = tuple(_all)
        if all(each.optimizer is not optimizer for each in every):
            for each in every:
                each.forget(parameters_of(optimizer))


def _versions(param: Tensor, kept: Tensor | None) -> Versions:
    """Return what differs once one was written to, swapped, replaced, or given other memory."""
    both = (param,) if kept is None else (param, kept)
    return [(identity_of(each), version_of(each), address_of(each)) for each in both]
