"""What ranks agree on before a step: whether a gradient is not finite, and the norm of all gradients.

One collective of two numbers. Each rank gives the power of the norm of what it holds, divided by the number
of ranks that hold the same, so that the sum over all ranks counts every element once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from amp_core.kernels import GradStats
    from amp_core.scaling.gradients import Gradients


class Ranks(NamedTuple):
    """Who agrees.

    Attributes:
        groups: a collective over one after the other reaches all of them; mostly one.
        size: how many they are.
    """

    groups: tuple[ProcessGroup, ...]
    size: int


def check_group(process_group: object) -> ProcessGroup | None:
    """Return `process_group` if ranks can agree over it.

    Raises:
        TypeError: it is no process group, or this rank is no member of it.
    """
    if process_group is None:
        return None
    from torch import distributed

    if distributed.is_available() and isinstance(process_group, distributed.ProcessGroup):
        return process_group
    raise TypeError(
        f"process_group must be a torch.distributed.ProcessGroup that this rank is a member of, got "
        f"{process_group!r}. torch.distributed.new_group gives ranks that are no members a number instead "
        f"of a group; a scaler there takes none."
    )


def ranks_of(parts: Sequence[Gradients], process_group: ProcessGroup | None) -> Ranks | None:
    """Return who shares the parameters: `process_group`, else the ranks of the DTensors' meshes, else nobody.

    Raises:
        ValueError: no collective over the groups of the meshes would reach all of their ranks alike.
    """
    meshes = list(dict.fromkeys(part.mesh for part in parts if part.mesh is not None))
    if process_group is not None:
        size = process_group.size()
        for mesh in meshes:
            if mesh.size() > size:
                raise ValueError(_TOO_FEW.format(mesh=mesh, size=size))
        return Ranks((process_group,), size)
    if len(meshes) > 1:
        meshes = _widest(meshes)
    if not meshes:
        return None
    ranks = [_of_mesh(mesh) for mesh in meshes]
    return Ranks(tuple(g for r in ranks for g in r.groups), math.prod(r.size for r in ranks))


def _widest(meshes: Sequence[DeviceMesh]) -> list[DeviceMesh]:
    """Return the meshes that are within no other, if they cross in this rank alone, as slices of one mesh do.

    All ranks find the same order, in which the collectives then come.
    """
    from torch import distributed

    reach = {frozenset(mesh.mesh.flatten().tolist()): mesh for mesh in meshes}
    wide = [ranks for ranks in reach if not any(ranks < other for other in reach)]
    here = {distributed.get_rank()}
    if len(wide) > 1 and any(a & b != here for a, b in itertools.combinations(wide, 2)):
        raise ValueError(_APART.format(meshes=", ".join(str(sorted(ranks)) for ranks in wide)))
    wide.sort(key=lambda ranks: [rank - min(ranks) for rank in sorted(ranks)])
    return [reach[ranks] for ranks in wide]


_TOO_FEW = (
    "process_group has {size} ranks, but a gradient is a DTensor on {mesh}. Pass a group that has all ranks "
    "of the mesh, or none: the ranks of the mesh then agree."
)
_APART = (
    "The gradients of one optimizer are DTensors on meshes of ranks {meshes}, which are no dimensions of one "
    "mesh, so it is not known who has to agree. Pass the group of all of these ranks to the GradScaler as "
    "process_group=."
)


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
    measured: Sequence[GradStats],
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
    flag = _any([m.found_inf for m in measured], device).double()
    norms = [m.norm.to(device).double() for m in measured]
    if largest:
        both = torch.stack(_largest(norms, flag))
    else:
        shares = [norm**norm_type * _share(p, parts, ranks) for norm, p in zip(norms, parts, strict=True)]
        both = torch.stack([torch.stack(shares).sum() if shares else torch.zeros_like(flag), flag])
    _reduce(both, ranks, largest=largest)
    norm = torch.where(both[1] > 1.0, torch.nan, both[0]) if largest else both[0] ** (1.0 / norm_type)
    return norm.float(), both[1].clamp(max=1.0).float()


def _largest(norms: Sequence[Tensor], flag: Tensor) -> list[Tensor]:
    """Return the largest of `norms` and the flag, 2 for a NaN: a collective's maximum may lose it."""
    largest = torch.stack([torch.zeros_like(flag), *norms]).amax()
    return [largest.nan_to_num(nan=0.0, posinf=torch.inf), torch.where(largest.isnan(), 2.0, flag)]


def _share(part: Gradients, parts: Sequence[Gradients], ranks: Ranks) -> float:
    """Return how much of the gradients counts as this rank's: the ranks that hold the same share it.

    A rank that sees a mesh that it is not in sees all parameters of all ranks: no other holds a copy then.
    """
    everywhere = any(p.mesh is not None and p.mesh.get_coordinate() is None for p in parts)
    holders = part.mesh.size() if everywhere and part.mesh is not None else ranks.size
    return part.shards / holders


def agree_on_flag(flags: Sequence[Tensor], ranks: Ranks, device: torch.device) -> Tensor:
    """Return 1.0 if a flag of some rank is, else 0.0."""
    flag = _any(flags, device).clone()
    _reduce(flag, ranks, largest=True)
    return flag


def _any(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    here = [flag.to(device).float().reshape(()) for flag in flags]
    return torch.stack(here).amax() if here else torch.zeros((), device=device)


def _reduce(values: Tensor, ranks: Ranks, *, largest: bool) -> None:
    from torch import distributed

    how = distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM
    for group in ranks.groups:
        distributed.all_reduce(values, op=how, group=group)
