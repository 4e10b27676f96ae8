"""The pass over the elements of a tensor: scale, round, saturate and count."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from amp_core._torch.tensors import is_dtensor
from amp_core._torch.tracing import is_compiling, may_hold
from amp_core.formats.elements import ElementFormat

_CHUNK = 2**15
"""On the CPU, so many elements stay in the cache between operations."""


def round_and_count(
    x: Tensor, encode: Tensor, random: Tensor | None, element: ElementFormat, may_overflow: bool
) -> tuple[Tensor, Tensor]:
    """Return ``x * encode`` rounded to `element`, and how many elements saturated and became 0.

    Args:
        x: float32.
        encode: float32, broadcastable to `x`; NaN where results must be NaN.
        random: see `ElementFormat.round`.
        element: the format.
        may_overflow: whether products may be larger than float32 represents.

    Returns:
        float32 of the shape of `x`, and int64 of shape ``(2,)``.
    """
    values, counts = [], []
    for part, factor, draws in _chunks(x, encode, random):
        scaled = part * factor
        if may_overflow:  # rounding shows an overflow as NaN
            limit = 2.0 ** (element.max_exponent + 1)
            scaled = torch.where(part.isfinite(), scaled.clamp(-limit, limit), torch.nan)
        rounded = element.round_unbounded(scaled, draws)
        value = element.saturate(rounded)
        saturated = _mask("gt", rounded.abs(), element.max)
        flushed = _mask("eq", value.clone(), 0).mul_(_mask("ne", part.clone(), 0))
        values.append(value)
        counts.append(_count(saturated, flushed))
    if len(values) == 1:
        return values[0].view(x.shape), counts[0]
    return torch.cat(values).view(x.shape), torch.stack(counts).sum(0)


def _mask(compare: str, owned: Tensor, other: Tensor | float) -> Tensor:
    """Return 1 where the comparison is true, else 0, in the dtype of `owned`, which is written over.

    On the CPU, torch compares and sums such masks faster than bool.
    """
    if is_dtensor(owned):  # torch 2.11 compares them out of place alone
        return getattr(owned, compare)(other).to(owned.dtype)  # type: ignore[no-any-return]
    return getattr(owned, f"{compare}_")(other)  # type: ignore[no-any-return]


def _count(*masks: Tensor) -> Tensor:
    """Return the number of ones in each mask, in int64."""
    if may_hold(masks[0].numel() >= 2**24):  # sums of ones are no longer exact
        return torch.stack([torch.count_nonzero(mask) for mask in masks])
    return torch.stack([mask.sum() for mask in masks]).to(torch.int64)


def count_nonfinite(x: Tensor) -> Tensor:
    """Return how many elements are inf, and how many are NaN, in int64 of shape ``(2,)``."""
    if is_dtensor(x):  # torch 2.11 compares none with another one
        return torch.stack([x.isinf().sum(), x.isnan().sum()])
    counts = [
        _count(part.abs().eq_(torch.inf), part.clone().ne_(part))
        for part, _, _ in _chunks(x, x.new_ones(()), None)
    ]
    return torch.stack(counts).sum(0)


def _chunks(
    x: Tensor, encode: Tensor, random: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield the tensors in parts along a first dimension: one part, unless the CPU gains from more."""
    # The ranks would gather all of a DTensor for each part of it.
    if x.device.type != "cpu" or is_compiling() or x.numel() <= _CHUNK or is_dtensor(x):
        yield x, encode, random
        return
    if encode.dim() == 0:
        x, encode = x.reshape(-1), encode.view(1)
        random = None if random is None else random.reshape(-1)
    while x.shape[0] == 1 and x.dim() > 1:
        x, encode, random = x[0], encode[0], None if random is None else random[0]
    count = max(1, _CHUNK * x.shape[0] // x.numel())
    for start in range(0, x.shape[0], count):
        part = slice(start, start + count)
        yield (
            x[part],
            encode if encode.shape[0] == 1 else encode[part],
            None if random is None else random[part],
        )
