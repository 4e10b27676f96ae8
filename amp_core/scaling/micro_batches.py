"""What an accumulation window finds in its micro-batches: which are bad, and in which parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from amp_core.scaling.arithmetic import combine, moved
from amp_core.scaling.collective import Ranks, agreed
from amp_core.scaling.distributed import Deciders, agree_on_flag
from amp_core.scaling.gradients import Gradients


class MicroBatches:
    """For each micro-batch of a window, whether it is bad and whether it has gradients.

    Ranks that step as one agree on both. Which parameters were bad is known of this rank's gradients alone.
    """

    def __init__(self) -> None:
        self._found: list[Tensor] = []  # for each: 1.0 if it is bad, 1.0 if it has gradients
        self._nonfinite: Tensor | None = None  # by the place of the parameter, above 0 if a gradient was bad
        self._ranks: Ranks | None = None
        self._places: dict[tuple[int, ...], Tensor] = {}

    def restart(self) -> None:
        """Forget all micro-batches; parameters keep their places."""
        self._found, self._nonfinite, self._ranks = [], None, None

    def add(
        self, parts: Sequence[Gradients], ids: tuple[int, ...], device: torch.device, deciders: Deciders
    ) -> None:
        """Read the gradients of a micro-batch; ranks exchange what they found.

        Args:
            parts: the gradients.
            ids: those of all parameters; none loses its place.
            device: where results go.
            deciders: they tell which ranks step as one.
        """
        stats = [part.grad_stats(2.0) for part in parts]
        flag = combine([s.found_inf for s in stats], device)
        found = torch.stack([flag, torch.full_like(flag, float(bool(parts)))])
        ranks = deciders.ranks([part.sharding for part in parts])
        self._ranks = ranks or self._ranks  # DTensors of an earlier micro-batch may have told
        self._found.append(found if ranks is None else agreed(found, ranks, largest=True))
        if parts or ranks is not None:
            self._make_room(len(ids), device)
        for part, stat in zip(parts, stats, strict=True):
            self._add_nonfinite(part, ids, moved(stat.nonfinite, device))

    def _make_room(self, count: int, device: torch.device) -> None:
        if self._nonfinite is None:
            self._nonfinite = torch.zeros(count, dtype=torch.float32, device=device)
        elif len(self._nonfinite) < count:
            self._nonfinite = pad(self._nonfinite.to(device), (0, count - len(self._nonfinite)))

    def _add_nonfinite(self, part: Gradients, ids: tuple[int, ...], nonfinite: Tensor) -> None:
        assert self._nonfinite is not None
        own = tuple(map(id, part.params))
        if own == ids:
            self._nonfinite.add_(nonfinite)
            return
        if own not in self._places:  # kept: the copy to the device may wait
            places = list(map(ids.index, own))
            self._places[own] = torch.tensor(places, device="cpu").to(nonfinite.device)
        self._nonfinite.index_add_(0, self._places[own], nonfinite)

    @property
    def last_is_bad(self) -> Tensor:
        """1.0 if the last micro-batch is bad, else 0.0."""
        return self._found[-1][0]

    @property
    def have_gradients(self) -> bool:
        """Whether a micro-batch has gradients on this rank, or may have on one that steps with it."""
        return self._nonfinite is not None

    def table(self) -> tuple[Tensor, Tensor]:
        """Return, for each micro-batch, 1.0 if it is bad, and 1.0 if it has gradients."""
        device = self._found[-1].device
        bad, with_gradients = torch.stack([moved(found, device) for found in self._found]).unbind(1)
        return bad, with_gradients

    def bad_parameters(self, count: int) -> Tensor:
        """Return, for each of `count` parameters, 1.0 if a gradient of it was bad."""
        assert self._nonfinite is not None
        return pad(self._nonfinite.clamp(max=1.0), (0, count - len(self._nonfinite)))

    def any_of(self, flags: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return 1.0 if a flag is, of any rank that steps as one with this one, else 0.0."""
        return combine(flags, device) if self._ranks is None else agree_on_flag(flags, self._ranks, device)
