"""Check whether a kernel may use the addresses of tensors, or the host read them. Called at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from amp_core._torch.tracing import functorch_is_at_work, is_compiling

_is_tracing = torch.compiler.is_dynamo_compiling
_TYPES = {Tensor, torch.nn.Parameter}
_FLOAT32 = torch.float32
_STRIDED = {torch.strided}


def are_real(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Return whether `tensors` have real memory on `device`: none is fake, traced or of a subclass."""
    if functorch_is_at_work() or is_compiling():
        return False
    return _TYPES.issuperset(map(type, tensors)) and {t.device for t in tensors} <= {device}


def on_host(*numbers: Tensor) -> bool:
    """Whether the host can read these scalars without waiting for a device."""
    if _is_tracing():
        return False
    for number in numbers:  # noqa: SIM110  # all() takes three times as long
        if type(number) is not Tensor or not number.is_cpu or number.dim():
            return False
    return True


read: Callable[[Tensor], Any] = Tensor.tolist
"""Returns the value of a scalar that is `on_host`. No torch operation, so nothing counts it as a wait."""


def are_numbers(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Return whether each of `tensors` is a single float32 in the memory of `device`."""
    for tensor in tensors:
        if type(tensor) not in _TYPES or tensor.dtype is not _FLOAT32 or tensor.device != device:
            return False
        if tensor.numel() != 1 or tensor.is_neg():
            return False
    return not (functorch_is_at_work() or is_compiling())


def are_plain(tensors: Sequence[Tensor], device: torch.device, dtypes: AbstractSet[torch.dtype]) -> bool:
    """Return whether each of `tensors` is dense memory on `device` with one of `dtypes`.

    A kernel that reads memory by its addresses may take such tensors, and hands on all others: subclasses,
    fake tensors, those of ``torch.func``, lazily negated or conjugated ones, views with gaps.

    Args:
        tensors: any tensors; an empty list has only such.
        device: the device with its index, as in ``tensor.device``.
        dtypes: the dtypes that the kernel takes.

    Example::

        from amp_core.kernels import are_plain

        matrix, cpu = torch.ones(4, 4), torch.device("cpu")
        assert are_plain([matrix, matrix.t()], cpu, {torch.float32})
        assert not are_plain([matrix[:, 0]], cpu, {torch.float32})
    """
    present = {t.dtype for t in tensors}
    if not are_real(tensors, device) or not present <= dtypes:
        return False
    if not {t.layout for t in tensors} <= _STRIDED or any([t.is_neg() for t in tensors]):
        return False
    if any([d.is_complex for d in present]) and any([t.is_conj() for t in tensors]):
        return False
    strided = [t for t in tensors if not t.is_contiguous()]
    return not strided or all(map(without_gaps, strided))


def without_gaps(tensor: Tensor) -> bool:
    """Return whether `tensor` is a permuted contiguous tensor, such as one in channels_last."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
