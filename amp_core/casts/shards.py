"""The part of a tensor that this rank holds; a plain tensor is its own only part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_core._torch.tensors import is_dtensor, part_of
from amp_core.common.counter_random import element_numbers


def whole(tensor: Tensor) -> Tensor:
    """Return all of `tensor`, whose parts the ranks of its mesh exchange: all of them must ask."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def like(tensor: Tensor, part: Tensor) -> Tensor:
    """Return `part` as the part on this rank of a tensor that is distributed as `tensor` is.

    It may have one dimension more, the last one, which is whole.
    """
    if not is_dtensor(tensor):
        return part
    from torch.distributed.tensor import DTensor

    shape, stride, last = tensor.shape, tensor.stride(), part.shape[tensor.dim() :]
    if last:
        shape, stride = torch.Size([*shape, *last]), (*(last[0] * each for each in stride), 1)
    result: Tensor = DTensor.from_local(
        part,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=shape,
        stride=stride,
    )
    return result


def elements(tensor: Tensor) -> Tensor | None:
    """Return the number of each element of this rank's part in the whole tensor; None if it is the whole.

    None, too, if it has no elements, as on a rank outside of the mesh.

    Raises:
        ValueError: the placement of a DTensor is other than even shards and replicas.
    """
    part = part_of(tensor)
    if part is tensor or not part.numel():
        return None
    offset = _offset(tensor, part)
    if part.shape == tensor.shape:
        return None
    return element_numbers(part.shape, offset, tensor.shape, part.device)


def _offset(tensor: Any, part: Tensor) -> list[int]:
    from torch.distributed.tensor import Replicate, Shard

    offset, shape = [0] * tensor.dim(), list(tensor.shape)
    kinds = {type(placement) for placement in tensor.placements}
    for ranks, rank, placement in zip(
        tensor.device_mesh.shape, tensor.device_mesh.get_coordinate(), tensor.placements, strict=True
    ):
        if type(placement) is Shard:  # as torch.chunk cuts
            size = -(-shape[placement.dim] // ranks)
            start = min(rank * size, shape[placement.dim])
            offset[placement.dim] += start
            shape[placement.dim] = min(size, shape[placement.dim] - start)
    if not kinds <= {Shard, Replicate} or tuple(shape) != tuple(part.shape):
        raise ValueError(
            f"The elements of a tensor placed as {tensor.placements} cannot be numbered, so stochastic "
            f"rounding would depend on the number of ranks. Use storage='remainder' with float32 states."
        )
    return offset
