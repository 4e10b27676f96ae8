"""What an op does with its tensors: cast, move or compute."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amp_core._torch.dispatcher import Overload, is_view, short_name
from amp_core._torch.tracing import copy_lists, to_copy
from amp_core.common.containers import tensors_in

_aten = torch.ops.aten

FILLS = {"masked_fill", "masked_fill_", "where", "masked_scatter", "index_fill", "index_fill_"}
"""Ops by which a program fills in numbers that need not be finite."""

CASTS = (to_copy, torch.ops.prims.convert_element_type.default)


def copied(func: Overload, args: tuple[Any, ...], result: Any) -> Iterable[tuple[Tensor, Tensor]]:
    """Return (source, copy) for each tensor that the op copies and possibly casts."""
    if func is copy_lists:
        return zip(args[1], args[0], strict=True)
    if func not in (*CASTS, _aten.copy_.default):
        return ()
    source, copy = (args[0], result) if func in CASTS else (args[1], args[0])
    return [(source, copy)] if isinstance(source, Tensor) else ()  # programs and vmap pass numbers


_MOVES = {
    "_foreach_copy_",
    "_foreach_zero_",
    "_to_copy",
    "_unsafe_view",
    "convert_element_type",
    "clone",
    "copy_",
    "detach",
    "empty_like",
    "fill_",
    "full_like",
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones_like",
    "set_",
    "wait_tensor",
    "_wrap_tensor_autograd",
    "zero_",
    "zeros_like",
}


@functools.cache
def only_moves(op: Overload) -> bool:
    """Return whether the op computes nothing and only creates a view, a copy or a new tensor."""
    looks_anew = is_view(op) or torch.Tag.inplace_view in op.tags
    return looks_anew or op.namespace in ("fsdp", "profiler") or short_name(op) in _MOVES


def results(op: str, outputs: list[Tensor]) -> list[Tensor]:
    """Return those outputs of an op that are its result, by its full name.

    Kernels of the forward pass, and ops of other libraries, may return more that only a gradient needs: the
    logarithms of an attention's sums, which are -inf in rows that are masked.
    """
    namespace, _, name = op.partition("::")
    for_gradients = namespace != "aten" or name.startswith(("_", "native_", "cudnn_", "miopen_"))
    all_count = not for_gradients or any(part in name for part in ("backward", "_foreach_", "linalg"))
    return outputs if all_count else outputs[:1]


def dtypes_of(tensors: Iterable[Tensor]) -> tuple[torch.dtype, ...]:
    """Return the distinct dtypes of the tensors, narrowest first."""
    return tuple(sorted({t.dtype for t in tensors}, key=lambda d: (d.itemsize, str(d))))


def is_low(dtype: torch.dtype) -> bool:
    """Return whether a floating-point dtype has fewer than 32 bits."""
    return dtype.itemsize < 4


def floats_in(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in arguments or results."""
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]


def numbers_in(value: Any) -> list[Tensor]:
    """Return the floating-point and the complex tensors in arguments or results."""
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point() or tensor.is_complex()]
