"""Which tensors are plain memory, so that a kernel may be given their addresses."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from amp_core import _torch

_TYPES = {Tensor, torch.nn.Parameter}


def are_real(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Whether the memory of `tensors` is there on `device`: none is fake, traced or of a subclass."""
    if _torch.functorch_is_at_work() or torch.compiler.is_compiling():
        return False
    return _TYPES.issuperset(map(type, tensors)) and {t.device for t in tensors} <= {device}


def are_plain(tensors: Sequence[Tensor], device: torch.device, dtypes: Collection[torch.dtype]) -> bool:
    """Whether each of `tensors` is a piece of memory on `device`, without gaps, of one of `dtypes`."""
    if not are_real(tensors, device) or any(t.dtype not in dtypes or t.is_sparse for t in tensors):
        return False
    if any(t.is_neg() or t.is_conj() for t in tensors):
        return False
    return all(t.is_contiguous() or without_gaps(t) for t in tensors)


def without_gaps(tensor: Tensor) -> bool:
    """Whether `tensor` is a permuted contiguous one, such as one in channels_last."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True)
    return tensor.permute(order).is_contiguous()
