"""What ranks agree on before a step: whether a gradient is not finite, and the norm of all gradients.

One collective of two numbers. Each rank gives the power of the norm of what it holds, divided by the number
of ranks that hold the same, so that the sum over all ranks counts every element once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from amp_core.kernels import Measurement
    from amp_core.scaler.gradients import Gradients


class Ranks(NamedTuple):
    """Who agrees.

    Attributes:
        groups: a collective over one after the other reaches all of them; mostly one.
        size: how many they are.
    """

    groups: tuple[ProcessGroup, ...]
    size: int


def ranks_of(parts: Sequence[Gradients], process_group: ProcessGroup | None) -> Ranks | None:
    """Return who shares the parameters: `process_group`, else the widest mesh of a DTensor, else nobody."""
    if process_group is not None:
        return Ranks((process_group,), process_group.size())
    meshes = [part.mesh for part in parts if part.mesh is not None]
    return _of_mesh(max(meshes, key=lambda mesh: mesh.size())) if meshes else None


def _of_mesh(mesh: DeviceMesh) -> Ranks:
    from torch import distributed

    if mesh.ndim > 1 and mesh.size() == distributed.get_world_size():
        world: Any = distributed.group.WORLD
        return Ranks((world,), mesh.size())
    return Ranks(tuple(mesh.get_all_groups()), mesh.size())


def shards_of(gradient: Any) -> int:
    """Return into how many pieces a DTensor is cut.

    Raises:
        ValueError: its ranks hold summands and not pieces.
    """
    from torch.distributed.tensor import Partial, Replicate

    if any(isinstance(placement, Partial) for placement in gradient.placements):
        raise ValueError(
            f"A gradient of shape {tuple(gradient.shape)} is placed {gradient.placements}: its ranks hold "
            f"summands, so its elements are not known yet. Redistribute it before the scaler looks at it."
        )
    pairs = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in pairs if not isinstance(placement, Replicate))


def agree(
    parts: Sequence[Gradients],
    measured: Sequence[Measurement],
    norm_type: float,
    ranks: Ranks,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the norm of the gradients of all ranks, and 1.0 if some rank's is not finite, else 0.0.

    Both are 0-dim, on `device`, and the same on every rank. Where a gradient is no DTensor, every rank is
    taken to have the same one, as under DistributedDataParallel.

    Raises:
        RuntimeError: a rank is gone; from ``torch.distributed``.
    """
    largest = math.isinf(norm_type)
    flag = _any([m.found_inf for m in measured], device)
    shares = [
        m.norm.to(device).double()
        if largest
        else _power(m.norm.to(device), norm_type, part.shards / ranks.size)
        for part, m in zip(parts, measured, strict=True)
    ]
    joined = torch.stack(shares) if shares else torch.zeros(1, dtype=torch.float64, device=device)
    both = torch.stack([joined.amax() if largest else joined.sum(), flag.double()])
    _reduce(both, ranks, largest=largest)
    norm = both[0] if largest else both[0] ** (1.0 / norm_type)
    return norm.float(), both[1].clamp(max=1.0).float()


def agree_on_flag(flags: Sequence[Tensor], ranks: Ranks, device: torch.device) -> Tensor:
    """Return 1.0 if a flag of some rank is, else 0.0."""
    flag = _any(flags, device).clone()
    _reduce(flag, ranks, largest=True)
    return flag


def _power(norm: Tensor, norm_type: float, share: float) -> Tensor:
    return norm.double() ** norm_type * share


def _any(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    here = [flag.to(device).float().reshape(()) for flag in flags]
    return torch.stack(here).amax() if here else torch.zeros((), device=device)


def _reduce(values: Tensor, ranks: Ranks, *, largest: bool) -> None:
    from torch import distributed

    how = distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM
    for group in ranks.groups:
        distributed.all_reduce(values, op=how, group=group)
