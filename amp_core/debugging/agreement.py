"""Give ranks that run a model together the same results, so that they continue with the same runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_core._torch.tensors import is_dtensor

T = TypeVar("T")


class Ranks:
    """The ranks that have shards or copies of some models: of DTensors' meshes, and of DDP's groups.

    Attributes:
        are_several: whether there are other ranks than this one.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        groups = dict.fromkeys(group for model in models for group in _groups(model))
        self._groups = [group for group in groups if dist.get_world_size(group) > 1]
        self.are_several = bool(self._groups)

    def merged(self, found: T, merge: Callable[[list[T]], T]) -> T:
        """Return the same value on all ranks: `merge` of what each found, over one group after the other.

        All ranks must call it, with values that can be pickled.
        """
        for group in self._groups:
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, found, group)
            found = merge(parts)
        return found


def _groups(model: nn.Module) -> Iterable[Any]:
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            yield module.process_group
    sharded: Iterable[Any] = filter(is_dtensor, model.parameters())
    for mesh in dict.fromkeys(param.device_mesh for param in sharded):
        if mesh.get_coordinate() is not None:  # otherwise other ranks have all of it
            yield from mesh.get_all_groups()
