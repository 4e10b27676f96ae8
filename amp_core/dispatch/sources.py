"""What active scopes serve to the ops of every thread; apart from the ops, so that a scaler can import it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from amp_core.common.locks import new_lock

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from amp_core.formats import AmaxHistory, Delayed

T = TypeVar("T")


class Sources(Generic[T]):
    """The active scopes of one kind.

    Attributes:
        active: in the order of registration; replaced as a whole, so that ops can read it without a lock.
    """

    def __init__(self) -> None:
        self.active: tuple[T, ...] = ()
        self._registered: dict[int, T] = {}
        self._lock = new_lock()

    def register(self, source: T) -> Callable[[], None]:
        """Serve from `source` from now on; return a function that ends this."""

        def unregister() -> None:
            with self._lock:
                self._registered.pop(id(source), None)
                self._publish()

        with self._lock:
            self._registered[id(source)] = source  # once, also if an interrupt lost an earlier `unregister`
            self._publish()
        return unregister

    def _publish(self) -> None:
        while self.active != (now := tuple(self._registered.values())):  # a finalizer may have changed them
            self.active = now


class HistorySource(Protocol):
    """A scope that keeps histories."""

    def history(self, weight: Tensor, role: str, delayed: Delayed) -> AmaxHistory | None:
        """Return the history of one role of the products of `weight`; None if the scope does not cover it."""

    def look_again(self) -> None:
        """Find the weights that the scope covers now: parameters may have been added or replaced."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """End a step of the histories whose weights `optimizer` has."""

    def largest(self, optimizers: Sequence[torch.optim.Optimizer], ranks: Sequence[int]) -> Tensor | None:
        """Return this rank's magnitudes for weights of `optimizers`, if these ranks agree on the largest.

        The number of elements is the same on all of them. None if others do, or none.
        """

    def settle(self, largest: Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Take over the magnitudes on which the ranks agreed."""


history_sources = Sources[HistorySource]()
