"""Agreement between ranks before a step: is a gradient not finite, and what is the norm of all gradients.

It takes one collective of two numbers. Each rank contributes the power of the norm of its pieces, divided by
the number of ranks that hold the same pieces, so that the sum over all ranks counts each element once.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_core._torch.tensors import fsdp_shards, is_dtensor
from amp_core.common.arguments import check_group
from amp_core.kernels.memory import on_host, read
from amp_core.scaling.arithmetic import combine
from amp_core.scaling.collective import Ranks, agreed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Sharding(NamedTuple):
    """How a gradient is spread over ranks.

    Attributes:
        shards: the number of pieces it is cut into, of which this rank has one; 1 if it is whole. None for
            a flattened parameter of ``FullyShardedDataParallel``, which does not say, and that nobody has
            described: the ranks of the scaler's process group then hold one piece each.
        mesh: the ranks that hold the pieces, for a DTensor; otherwise None.
        over: the number of ranks, or meshes, that each hold another part of the model; see `describe`.
    """

    shards: int | None = 1
    mesh: DeviceMesh | None = None
    over: int = 1


WHOLE = Sharding()
_FSDP1 = Sharding(None)


class Deciders(NamedTuple):
    """Who decides on a step, and of which optimizers.

    Attributes:
        process_group: the ranks that share the parameters; None to tell by the gradients.
        optimizers: those that step or skip together.
        step: the number of the step, for errors.
    """

    process_group: ProcessGroup | None
    optimizers: tuple[torch.optim.Optimizer, ...]
    step: int | None = None

    def ranks(self, shardings: Sequence[Sharding]) -> Ranks | None:
        """Return the ranks that share the parameters, or None if this process is alone.

        These are the ranks of `process_group`, or by default those of the DTensors' meshes.

        Raises:
            ValueError: `process_group` is too small, or it is missing and the gradients do not tell which
                ranks have to agree, or are on other ranks only.
        """
        meshes = list(dict.fromkeys(s.mesh for s in shardings if s.mesh is not None))
        if self.process_group is not None:
            size = self.process_group.size()
            for sharding in shardings:
                if sharding.mesh is not None and sharding.mesh.size() * sharding.over > size:
                    raise ValueError(_TOO_FEW.format(mesh=sharding.mesh, size=size))
            return Ranks((self.process_group,), size, self.optimizers, self.step)
        if any(s.over > 1 for s in shardings):
            raise ValueError(_ALONE)
        if any(s.shards is None for s in shardings):
            raise ValueError(_NO_GROUP)
        if not meshes:
            return None
        if len(meshes) > 1:
            meshes = _widest(meshes)
        for mesh in meshes:
            if mesh.get_coordinate() is None:
                raise ValueError(_OUTSIDE.format(ranks=mesh.mesh.flatten().tolist()))
        groups = tuple(group for mesh in meshes for group in _groups_of(mesh))
        size = math.prod(mesh.size() for mesh in meshes)
        return Ranks(groups, size, self.optimizers, self.step)


_over: dict[int, int] = {}
"""``id(parameter)`` -> `Sharding.over`, for parameters that were described."""


def describe(sharded_over: Mapping[Any, Iterable[Tensor]], process_group: ProcessGroup | None) -> None:
    """Note over which groups parameters are sharded by means other than DTensors.

    Args:
        sharded_over: process group or mesh -> the parameters of which its ranks hold different parts. A
            parameter under several groups is sharded over all of them.
        process_group: the ranks that agree.

    Raises:
        TypeError: a key is not a process group or mesh that this rank is a member of, or a value is not a
            tensor.
        ValueError: there is no `process_group`, or parts of these numbers do not divide it evenly.
    """
    if not isinstance(sharded_over, Mapping):
        raise TypeError(f"sharded_over= must map groups to parameters, not {sharded_over!r}.")
    if sharded_over and process_group is None:
        raise ValueError(_ALONE)
    found: dict[int, tuple[Tensor, int]] = {}
    for group, params in sharded_over.items():
        size = _members(group)
        for param in _listed(params):
            found[id(param)] = param, size * found.get(id(param), (param, 1))[1]
    for param, over in found.values():
        if process_group is not None and process_group.size() % over:
            raise ValueError(
                f"sharded_over says that a parameter of shape {tuple(param.shape)} is cut into {over} parts, "
                f"which the {process_group.size()} ranks of process_group cannot hold equally often. Pass "
                f"each group of ranks with different parts once, and as process_group= all ranks that step."
            )
    for key, (param, over) in found.items():
        if key not in _over:
            weakref.finalize(param, _over.pop, key, None)
        _over[key] = over


def _listed(params: Iterable[Tensor]) -> list[Tensor]:
    """Return `params`, each once."""
    if isinstance(params, (Tensor, nn.Module)):
        what = type(params).__name__
        raise TypeError(f"sharded_over must map each group to an iterable of parameters, not to a {what}.")
    unique = list({id(param): param for param in params}.values())
    for param in unique:
        if not isinstance(param, Tensor):
            raise TypeError(f"sharded_over must map each group to its parameters, got {param!r} in one.")
    return unique


def _members(group: Any) -> int:
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        return group.size()
    return check_group(group, "a key of sharded_over").size()


_ALONE = (
    "Parameters are described by sharded_over=, but the scaler does not know which ranks step together. Pass "
    "GradScaler(..., process_group=torch.distributed.group.WORLD), or the group of all ranks of the model."
)


def refuse_on_ranks() -> None:
    """Raise ValueError if there are other ranks, with which a scaler without their group cannot agree."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ValueError(
            "This scaler does not know which ranks step together: it was pickled, and process groups cannot "
            "be. Create a new one, GradScaler(..., process_group=...), and load its state_dict."
        )


def _widest(meshes: Sequence[DeviceMesh]) -> list[DeviceMesh]:
    """Return the meshes that no other contains, in an order that is the same on all ranks.

    Raises:
        ValueError: two of them share more than this rank, so they are not dimensions of one mesh.
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
    "of the mesh, or no group: the ranks of the mesh then agree."
)
_APART = (
    "The gradients of one optimizer are DTensors on meshes of ranks {meshes}. These are not dimensions of "
    "one mesh, so the scaler cannot tell which ranks have to agree. Pass the group of all of these ranks to "
    "the GradScaler as process_group=."
)
_OUTSIDE = (
    "Gradients are DTensors on a mesh of ranks {ranks}, which this rank is outside of, so it cannot tell "
    "whether they step. Pass the group of all ranks that have this optimizer to the GradScaler as "
    "process_group=."
)
_NO_GROUP = (
    "The gradients are shards of a FullyShardedDataParallel model, and each rank sees only its own, so ranks "
    "would disagree on overflow and norm. Pass the group that the parameters are sharded over: "
    "GradScaler(..., process_group=model.process_group). Or shard with torch.distributed.fsdp.fully_shard, "
    "which needs no group."
)


def _groups_of(mesh: DeviceMesh) -> list[ProcessGroup]:
    """Return groups of ranks that together reach the whole mesh; one if torch has one of all its ranks."""
    from torch import distributed

    if mesh.ndim > 1 and mesh.size() == distributed.get_world_size():
        world: Any = distributed.group.WORLD
        return [world]
    return mesh.get_all_groups()


def shardings_of(params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Sharding]:
    """Return how each gradient is spread over ranks; none is a DTensor of summands."""
    shards = fsdp_shards(params)
    return [_sharding_of(p, grad, id(p) in shards) for p, grad in zip(params, grads, strict=True)]


def _sharding_of(param: Tensor, gradient: Any, is_fsdp_shard: bool) -> Sharding:
    over = _over.get(id(param), 1) if _over else 1
    if is_dtensor(gradient):
        return Sharding(_shards_of(gradient), gradient.device_mesh, over)
    if is_fsdp_shard and over == 1:
        return _FSDP1
    return WHOLE if over == 1 else Sharding(over=over)


def _shards_of(gradient: Any) -> int:
    from torch.distributed.tensor import Replicate

    pairs = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in pairs if not isinstance(placement, Replicate))


def agree(
    norms: Sequence[Tensor],
    flags: Sequence[Tensor],
    shardings: Sequence[Sharding],
    norm_type: float,
    ranks: Ranks,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the norm of the gradients of all ranks, and 1.0 if any of them is not finite, else 0.0.

    Both are 0-dim, on `device`, and the same on every rank; the norm is float64. A gradient that is not
    sharded is taken to be the same on every rank, as under ``DistributedDataParallel``.

    Args:
        norms: the norm of this rank's gradients, for each sharding.
        flags: 1.0 where one of these is not finite.
        shardings: how they are spread.
        norm_type: the order of the norm.
        ranks: who agrees.
        device: where the results go.

    Raises:
        RankLostError: a rank is gone.
    """
    largest = math.isinf(norm_type)
    if norm_type == 2.0 and device.type == "cpu" and on_host(*norms, *flags):
        both = _summands_on_host(norms, flags, shardings, ranks)
    elif largest:
        flag = combine(flags, device).double()
        both = torch.stack(_largest([norm.to(device).double() for norm in norms], flag))
    else:
        flag = combine(flags, device).double()
        shares = [
            norm.to(device).double() ** norm_type * _share(sharding, shardings, ranks)
            for norm, sharding in zip(norms, shardings, strict=True)
        ]
        both = torch.stack([torch.stack(shares).sum() if shares else torch.zeros_like(flag), flag])
    both = agreed(both, ranks, largest=largest)
    norm = torch.where(both[1] > 1.0, torch.nan, both[0]) if largest else both[0] ** (1.0 / norm_type)
    return norm, both[1].clamp(max=1.0).float()


def _summands_on_host(
    norms: Sequence[Tensor], flags: Sequence[Tensor], shardings: Sequence[Sharding], ranks: Ranks
) -> Tensor:
    """Return what `agree` sums for the norm of order 2, computed without a dozen small operations."""
    total = 0.0
    for norm, sharding in zip(map(read, norms), shardings, strict=True):
        total += norm * norm * _share(sharding, shardings, ranks)
    return torch.tensor([total, max(map(read, flags), default=0.0)], dtype=torch.float64, device="cpu")


def _largest(norms: Sequence[Tensor], flag: Tensor) -> list[Tensor]:
    """Return the largest norm and the flag, 2 for a NaN, which the maximum of a collective may lose."""
    largest = torch.stack([torch.zeros_like(flag), *norms]).amax()
    return [largest.nan_to_num(nan=0.0, posinf=torch.inf), torch.where(largest.isnan(), 2.0, flag)]


def _share(sharding: Sharding, shardings: Sequence[Sharding], ranks: Ranks) -> float:
    """Return the part of this rank's gradients that counts here; ranks with the same pieces share them.

    A rank outside of a mesh sees all parameters of all ranks, so no rank outside of its mesh has a copy.
    """
    if sharding.shards is None:
        return 1.0
    if sharding.over > 1:
        return sharding.shards * sharding.over / ranks.size
    mesh = sharding.mesh
    outside = any(s.mesh is not None and s.mesh.get_coordinate() is None for s in shardings)
    holders = mesh.size() if outside and mesh is not None else ranks.size
    return sharding.shards / holders


def agree_on_flag(flags: Sequence[Tensor], ranks: Ranks, device: torch.device) -> Tensor:
    """Return 1.0 if any flag of any rank is, else 0.0."""
    return agreed(combine(flags, device).clone().view(1), ranks, largest=True).view(())
