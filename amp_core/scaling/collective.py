"""The one collective of a decision on a step, which histories of delayed scales join."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from amp_core.dispatch.sources import HistorySource, history_sources
from amp_core.errors import RankLostError
from amp_core.scaling.arithmetic import is_tracing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Ranks(NamedTuple):
    """The ranks that agree.

    Attributes:
        groups: collectives over each of these in turn reach all ranks; usually one group.
        size: the number of ranks.
        optimizers: the optimizers on whose step they decide.
        step: the number of that step, as in `StepRecord.number`.
    """

    groups: tuple[ProcessGroup, ...]
    size: int
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    step: int | None = None


def agreed(values: Tensor, ranks: Ranks, *, largest: bool) -> Tensor:
    """Return the sum or the largest of `values`, written, over the ranks, and let histories of scales join.

    Theirs is always the largest. A sum is then made of what each rank has in a place of its own: the place
    of its global number.
    """
    joining = _joining(ranks)
    if not joining:
        _reduce(values, ranks, largest=largest)
        return values
    from torch import distributed

    summands = values[:0]
    if not largest:
        summands = values.new_zeros(distributed.get_world_size())
        summands[distributed.get_rank()] = values[0]
        # A maximum may lose a NaN.
        values = torch.where(values[:1].isnan(), 2.0, values[1:])
    parts = [summands.nan_to_num(nan=0.0, posinf=torch.inf), values, *(each for _, each in joining)]
    row = torch.cat([part.to(values) for part in parts])
    _reduce(row, ranks, largest=True)
    summands, values, *rest = torch.split(row, [part.numel() for part in parts])
    for (source, mine), amax in zip(joining, rest, strict=True):
        source.settle(amax.to(mine), ranks.optimizers)
    if largest:
        return values
    total = torch.where(values > 1.0, torch.nan, summands.sum())
    return torch.cat([total, values])


def _joining(ranks: Ranks) -> list[tuple[HistorySource, Tensor]]:
    """Return the scopes whose histories these ranks agree on, with their part here."""
    if not (history_sources.active and ranks.optimizers) or len(ranks.groups) > 1 or is_tracing():
        return []
    from torch import distributed

    members = distributed.get_process_group_ranks(ranks.groups[0])
    parts = [(each, each.largest(ranks.optimizers, members)) for each in history_sources.active]
    return [(each, part) for each, part in parts if part is not None]


def _reduce(values: Tensor, ranks: Ranks, *, largest: bool) -> None:
    from torch import distributed

    how = distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM
    for group in ranks.groups:
        try:
            distributed.all_reduce(values, op=how, group=group)
        except RuntimeError as error:
            _check_serves(group, values.device.type)
            raise _lost(group, ranks.step) from error


def _check_serves(group: ProcessGroup, device_type: str) -> None:
    """Raise RuntimeError if `group` cannot reduce tensors on `device_type`."""
    from torch import distributed

    backends = distributed.get_backend_config(group)  # such as cpu:gloo,cuda:nccl
    if f"{device_type}:" not in backends:
        raise RuntimeError(
            f"The gradients are on {device_type!r}, but the process group {group.group_name!r} has backends "
            f"for {backends} only, so its ranks cannot decide on the step. Create it with one for "
            f"{device_type!r} too, as by init_process_group('cpu:gloo,cuda:nccl')."
        )


def _lost(group: ProcessGroup, step: int | None) -> RankLostError:
    from torch import distributed

    here = distributed.get_rank()
    others = tuple(rank for rank in distributed.get_process_group_ranks(group) if rank != here)
    who = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
    return RankLostError(
        f"Rank {here} waited for the gradients of {who} (process group "
        f"{group.group_name!r}, {distributed.get_backend(group)}) to decide on the step, but at least one of "
        f"them has ended, hangs, or made other calls; torch's reason is in the error above. Rank {here} has "
        f"not stepped. Start all ranks again from the last checkpoint. How long a rank waits is a setting of "
        f"the group: init_process_group(timeout=) or new_group(timeout=).",
        others,
        step,
    )
