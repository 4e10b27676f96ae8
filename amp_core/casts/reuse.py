"""Tell whether regions use weights again before they change."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.nn import Parameter

from amp_core._torch.tensors import version_of
from amp_core.casts.bulk import is_small_on_host

_PLAIN_STEPS = 2
"""After as many steps without reuse, the next one is expected to have none either."""


class Reuse:
    """Watches the regions and the optimizer's steps of a model.

    Where an optimizer steps after each region, torch casts each weight once, and so does a scope. If all
    weights are small, the scope gains nothing, and its kernels in Python cost some per cent of a step.
    """

    def __init__(self) -> None:
        self._versions: list[int] | None = None
        self._region_ended = self._expects_reuse = False
        self._plain_steps = 0

    def after_region(self, weights: Callable[[], Collection[Tensor]]) -> bool:
        """Return whether regions are expected to use the weights again before they change.

        They are if the weights are as they were when another region ended, if the region computed no
        gradients, or if some are frozen: torch casts these at each use.
        """
        self._region_ended = True
        if not self._expects_reuse:
            known = weights()
            before, self._versions = self._versions, _versions(known)
            is_training = torch.is_grad_enabled() and all(weight.requires_grad for weight in known)
            self._expects_reuse = not is_training or (before is not None and before == self._versions)
        return self._expects_reuse

    def after_step(self) -> bool:
        """Return whether at most one region ended before each of the last steps.

        Several optimizers may step after one region.
        """
        if self._region_ended:
            self._plain_steps = 0 if self._expects_reuse else self._plain_steps + 1
        self._region_ended = self._expects_reuse = False
        self._versions = None  # a fused optimizer leaves the version counters
        return self._plain_steps >= _PLAIN_STEPS


def _versions(weights: Collection[Tensor]) -> list[int] | None:
    try:
        return list(map(version_of, weights))
    except RuntimeError:  # an inference tensor, swapped in for a weight: its writes are not counted
        return None


def only_reuse_pays(weights: Collection[Tensor]) -> bool:
    """Return whether a scope gains nothing if no region uses `weights` again before they change."""
    return all(
        weight.requires_grad and type(weight) in (Parameter, Tensor) and is_small_on_host(weight)
        for weight in weights
    )
