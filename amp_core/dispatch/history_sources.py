"""The scopes that keep histories of delayed scales; apart from their use, so that a scaler can import it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from amp_core.dispatch.sources import Sources

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from amp_core.formats import AmaxHistory, Delayed


class HistorySource(Protocol):
    """A scope that keeps histories."""

    def history(self, weight: Tensor, role: str, delayed: Delayed) -> AmaxHistory | None:
        """Return the history of one role of the products of `weight`; None if the scope does not cover it."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """End a step of the histories whose weights `optimizer` has."""

    def largest(self, optimizers: Sequence[torch.optim.Optimizer], ranks: Sequence[int]) -> Tensor | None:
        """Return this rank's magnitudes for weights of `optimizers`, if these ranks agree on the largest.

        The number of elements is the same on all of them. None if others do, or none.
        """

    def settle(self, largest: Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Take over the magnitudes on which the ranks agreed."""


sources = Sources[HistorySource]()
