"""The passes over the gradients: read them, unscale them, clip them. Plain functions over `Gradients`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from amp_core.kernels import GradStats
from amp_core.kernels.memory import on_host, read
from amp_core.scaling.arithmetic import (
    FLOAT32_MAX,
    FLOAT32_TINY,
    any_of,
    clip_on_host,
    inverse_of,
    is_tracing,
    moved,
    unscale_and_clip,
    zero,
)
from amp_core.scaling.distributed import WHOLE, Deciders, agree, agree_on_flag
from amp_core.scaling.gradients import Gradients
from amp_core.scaling.optimizer_state import _MultiDeviceReplicator
from amp_core.scaling.overlap import Overlap
from amp_core.states.loss_scale import float32

Flags = dict[torch.device, Tensor]
"""One overflow flag per device: 1.0 if a gradient is not finite, else 0.0."""


class GlobalGradStats(NamedTuple):
    """What one read of all gradients of an optimizer yields.

    Attributes:
        stats: for each part.
        norm: 0-dim, of all gradients as they are now.
        flags: one per device.
        agreed: whether norm and flags are those of all ranks, some of which may have no gradient.
        dtype: the dtype in which a norm of these gradients is returned.
    """

    stats: list[GradStats]
    norm: Tensor
    flags: Flags
    agreed: bool = False
    dtype: torch.dtype = torch.float32


def read_gradients(
    parts: Sequence[Gradients],
    norm_type: float,
    device: torch.device,
    deciders: Deciders,
    overlap: Overlap | None,
) -> GlobalGradStats:
    """Read the gradients once, unless the backward already has; agree with other ranks that share them.

    Args:
        parts: the gradients.
        norm_type: the order of the norm.
        device: where the norm goes.
        deciders: the ranks that share the parameters.
        overlap: what was read during the backward.
    """
    if overlap is None or is_tracing():
        stats = [part.grad_stats(norm_type) for part in parts]
    else:
        stats = [overlap.grad_stats(part, norm_type) for part in parts]
    if deciders.process_group is None and len(parts) == 1 and parts[0].sharding is WHOLE:  # the usual case
        (only,), flags = stats, {parts[0].device: stats[0].found_inf}
        norm = only.norm if only.norm.device == device else moved(only.norm, device)
        return GlobalGradStats(stats, norm, flags, dtype=only.norm.dtype)
    dtype = torch.float64 if any([s.norm.dtype is torch.float64 for s in stats]) else torch.float32
    shardings = [part.sharding for part in parts]
    ranks = deciders.ranks(shardings)
    if ranks is None:
        flags = by_device([(p.device, s.found_inf) for p, s in zip(parts, stats, strict=True)])
        return GlobalGradStats(stats, _total_norm(stats, norm_type, device), flags, dtype=dtype)
    norms, found = [s.norm for s in stats], [s.found_inf for s in stats]
    norm, flag = agree(norms, found, shardings, norm_type, ranks, device)
    return GlobalGradStats(stats, norm, {device: flag}, agreed=True, dtype=dtype)


def _total_norm(stats: Sequence[GradStats], norm_type: float, device: torch.device) -> Tensor:
    if not stats:
        return torch.zeros((), dtype=torch.float32, device=device)
    norms = torch.stack([moved(s.norm, device) for s in stats])
    wide = torch.float64 if norms.is_cpu else None  # squares may be beyond float32
    total: Tensor = torch.linalg.vector_norm(norms, norm_type, dtype=wide)
    return total


def by_device(flags: Sequence[tuple[torch.device, Tensor]]) -> Flags:
    """Return one flag per device: 1.0 if any of its flags is, else 0.0."""
    grouped: dict[torch.device, list[Tensor]] = {}
    for device, flag in flags:
        grouped.setdefault(device, []).append(flag)
    return {device: any_of(several) for device, several in grouped.items()}


def multiply_all_(parts: Sequence[Gradients], factor: Tensor, found_inf: Tensor, deciders: Deciders) -> Flags:
    """Multiply all gradients; return the flags, those of all ranks that share the parameters.

    Args:
        parts: the gradients; written.
        factor: 0-dim float32.
        found_inf: 0-dim float32; set to 1.0 if a gradient on its device is not finite.
        deciders: as for `read_gradients`.
    """
    if len(parts) == 1 and parts[0].device == factor.device:  # the usual case, without bookkeeping
        parts[0].multiply_(factor, found_inf)
        found = {factor.device: found_inf}
    else:
        factors, flags = _MultiDeviceReplicator(factor), _MultiDeviceReplicator(found_inf)
        for part in parts:
            part.multiply_(factors.get(part.device), flags.get(part.device))
        found = flags._per_device_tensors
    if deciders.process_group is None and len(parts) == 1 and parts[0].sharding is WHOLE:
        return found
    ranks = deciders.ranks([part.sharding for part in parts])
    if ranks is None:
        return found
    device = found_inf.device
    return {device: agree_on_flag(list(found.values()), ranks, device)}


def clip_factor(
    parts: Sequence[Gradients],
    stats: GlobalGradStats,
    scale: Tensor,
    max_norm: float,
    norm_type: float,
    deciders: Deciders,
    *,
    as_divisor: bool = False,
) -> tuple[Tensor, Tensor, GlobalGradStats]:
    """Return the norm of the unscaled gradients, the factor that unscales and clips, and the statistics.

    Gradients can be finite while their norm, or the factor, is beyond float32. If the host can read the
    numbers, the gradients are then brought into range first, and the factor and the statistics returned are
    those of the gradients as they are afterwards. If it cannot, an overflow is flagged: the step is skipped
    and the scale falls until the norm fits.
    """
    flags = list(stats.flags.values())
    if not on_host(stats.norm, scale, *flags) or not isinstance(max_norm, (int, float)):
        true_norm, factors = unscale_and_clip(stats.norm, scale, max_norm, as_divisor=as_divisor)
        lost = factors > FLOAT32_MAX if as_divisor else factors < FLOAT32_TINY
        return true_norm.to(stats.dtype), factors, _flag(stats, (lost & (max_norm > 0.0)).float())
    norm, by = read(stats.norm), read(scale)
    true, factor = clip_on_host(norm, by, inverse_of(by), max_norm, as_divisor=as_divisor)
    # Of float64 gradients, it may be the squares alone that are beyond float64: `_clip_large` finds out.
    # Ranks that have agreed on the norm must not part because one of them has other dtypes.
    wide = stats.dtype is torch.float64 and not stats.agreed
    overflow = by < 1.0 and not wide and true > FLOAT32_MAX
    in_range = math.isfinite(norm) and 1.0 / _LARGE < factor < _LARGE
    if not (in_range or overflow or any(map(read, flags))):
        return _clip_large(parts, stats, scale, max_norm, norm_type, deciders, as_divisor=as_divisor)
    if overflow:  # a scale below 1 may have taken the unscaled gradients beyond their dtype, as in torch
        stats = _all_flagged(stats)
    return *_scalars(true, factor, stats.dtype), stats


def _scalars(true: float, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    true = float32(true) if dtype is torch.float32 else true
    number = torch.full((), float32(factor), dtype=torch.float32, device="cpu")
    return torch.full((), true, dtype=dtype, device="cpu"), number


_LARGE = 2.0**100
"""Above this factor or below its inverse, factors may leave float32."""

_SHIFT = 32
"""Gradients beyond the range are divided by 2 to this power, often enough."""


def _clip_large(
    parts: Sequence[Gradients],
    stats: GlobalGradStats,
    scale: Tensor,
    max_norm: float,
    norm_type: float,
    deciders: Deciders,
    *,
    as_divisor: bool,
) -> tuple[Tensor, Tensor, GlobalGradStats]:
    shifts = 0
    while math.isinf(read(stats.norm)):
        _shift_(parts, -_SHIFT)
        shifts += 1
        stats = read_gradients(parts, norm_type, scale.device, deciders, None)
    divisor = math.ldexp(read(scale), -_SHIFT * shifts)
    norm, inverse = read(stats.norm), 1.0 / divisor
    true, factor = clip_on_host(norm, divisor, inverse, max_norm, as_divisor=as_divisor)
    power = 0
    if true > _BEYOND and 0.0 < max_norm < true:
        mantissa, power = math.frexp(norm)
        factor, power = (mantissa / max_norm, power) if as_divisor else (max_norm / mantissa, -power)
    if math.isinf(true) and read(scale) < 1.0:
        stats = _all_flagged(stats)
    exponent = power + math.frexp(factor)[1] if 0.0 < factor < math.inf else 0
    if abs(exponent) > 100:  # a factor that float32 cannot hold: apply a power of two of it now
        _shift_(parts, -exponent if as_divisor else exponent)
        power -= exponent
    return *_scalars(true, math.ldexp(factor, power), stats.dtype), stats


_BEYOND = 2.0**500
"""Above this norm, the quotient of two norms may leave float64."""


def _shift_(parts: Sequence[Gradients], exponent: int) -> None:
    """Multiply the gradients by 2 to the `exponent`, in steps that float32 can hold."""
    while exponent:
        step = max(-64, min(exponent, 64))
        exponent -= step
        factors = _MultiDeviceReplicator(torch.full((), 2.0**step, dtype=torch.float32, device="cpu"))
        for part in parts:
            part.multiply_(factors.get(part.device), None)


def _all_flagged(stats: GlobalGradStats) -> GlobalGradStats:
    flags = {device: torch.ones_like(flag) for device, flag in stats.flags.items()}
    return stats._replace(flags=flags)


def _flag(stats: GlobalGradStats, found: Tensor) -> GlobalGradStats:
    flags = dict(stats.flags)
    device = stats.norm.device
    flags[device] = torch.maximum(flags[device], found) if device in flags else found
    return stats._replace(flags=flags)


def multiply_and_flag_(
    parts: Sequence[Gradients],
    factor: Tensor,
    stats: GlobalGradStats,
    flags: Flags,
    deciders: Deciders,
    *,
    allow_fp16: bool,
) -> Flags:
    """Multiply gradients that were read; return the flags, with those of products that overflow.

    Args:
        parts: the gradients; written.
        factor: 0-dim float32.
        stats: what was read.
        flags: the flags recorded so far; returned in addition.
        deciders: as for `read_gradients`.
        allow_fp16: whether gradients of some ranks may be float16.
    """
    if len(parts) == 1 and not (flags or stats.agreed) and parts[0].device == factor.device:
        parts[0].multiply_(factor, stats.flags[factor.device])  # the usual case, without bookkeeping
        return stats.flags
    every = list(flags.items())
    if stats.agreed and on_host(factor) and read(factor) > 1.0:  # rare: products may overflow on some ranks
        found = multiply_all_(parts, factor, zero(factor.device), deciders)
        return by_device([*every, *stats.flags.items(), *found.items()])
    factors, unread = _MultiDeviceReplicator(factor), dict(stats.flags)
    if stats.agreed and not on_host(factor):
        # This rank must not flag overflow of its own products: the other ranks would not know.
        beyond = _may_overflow(stats.norm, factor, allow_fp16=allow_fp16)
        unread = {device: torch.maximum(flag, beyond) for device, flag in unread.items()}
    for part in parts:
        if stats.agreed:
            part.multiply_(factors.get(part.device), None)
            continue
        before = unread.pop(part.device, None)
        flag = zero(part.device) if before is None else before
        part.multiply_(factors.get(part.device), flag)
        every.append((part.device, flag))
    return by_device([*every, *unread.items()])


def _may_overflow(norm: Tensor, factor: Tensor, *, allow_fp16: bool) -> Tensor:
    """Return 1.0 if gradients of this norm, times `factor`, can be beyond the dtype of a rank, else 0.0."""
    largest = torch.finfo(torch.float16 if allow_fp16 else torch.bfloat16).max
    return ((norm * factor <= largest).logical_not() & (factor > 1.0)).float()
