"""Formats of scales, and the scale of a group from its largest magnitude (amax).

A group is what shares one scale: a tensor, a row, a block or a tile. An element is stored as
``round(x * encode)``, and stands for ``value * scale``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from amp_core.formats.elements import E4M3, ElementFormat

SCALES = {
    "float32": "max / amax in float32",
    "power_of_two": "the largest power of two not above max / amax, in float32",
    "e8m0": "a power of two: floor(log2(amax)) - emax, as OCP MX v1.0 has it; up to half of the largest "
    "values of a block saturate",
    "e8m0_up": "a power of two: ceil(log2(amax / max)); nothing saturates",
    "e4m3": "e4m3 per group under one float32 per tensor, as NVFP4 has it",
}
"""The formats of scales, and how the scale follows from amax."""

_MAX_ENCODE = 2.0**126
"""Its reciprocal is the smallest normal float32: devices may flush smaller ones."""

_SMALL_MAX = 4.0
"""For a smaller `max`, ``max / amax`` may be below that reciprocal."""


class GroupScales(NamedTuple):
    """What scales the groups of a tensor.

    Attributes:
        encode: float32; an element is multiplied by it before it is rounded.
        scale: float32, in its format's values; NaN for a group whose amax is inf or NaN.
        tensor_scale: 0-dim float32, the second scale of ``"e4m3"``; None for the other formats.
    """

    encode: Tensor
    scale: Tensor
    tensor_scale: Tensor | None = None


def may_saturate(element: ElementFormat, scale: str) -> bool:
    """Return whether scales may take amax beyond the largest value of the elements."""
    return scale in ("e8m0", "e4m3") or element.max < _SMALL_MAX


def find_scales(amax: Tensor, element: ElementFormat, scale: str, tensor_amax: Tensor) -> GroupScales:
    """Return the scales of groups with the largest magnitudes `amax`.

    Args:
        amax: float32, not negative, one per group.
        element: the format of the elements.
        scale: a key of `SCALES`.
        tensor_amax: 0-dim float32, the largest magnitude in the tensor; only ``"e4m3"`` reads it.
    """
    if scale == "e4m3":
        return _two_levels(amax, element, tensor_amax)
    if scale.startswith("e8m0"):
        return _e8m0(amax, element, up=scale == "e8m0_up")
    encode = (_filled(amax, element.max) / amax).clamp(1 / _MAX_ENCODE, _MAX_ENCODE)
    if scale == "power_of_two":
        encode = _power_of_two(exponent_field(encode))
    encode = torch.where(amax == 0, 1.0, encode)
    encode = nan_unless_finite(encode, amax)
    return GroupScales(encode, 1.0 / encode)


def _two_levels(amax: Tensor, element: ElementFormat, tensor_amax: Tensor) -> GroupScales:
    """NVFP4: the tensor's largest magnitude maps to the largest scale times the largest element.

    Scales below the smallest e4m3 value are raised to it, so that none is 0.
    """
    outer = outer_scale(tensor_amax, element)
    wanted = (amax / _filled(amax, element.max) / outer).clamp(max=E4M3.max)  # before rounding: it may be inf
    inner = E4M3.round(wanted).clamp(min=E4M3.smallest_subnormal)
    inner = nan_unless_finite(inner, amax)
    encode = ((1.0 / outer) / inner).clamp(max=torch.finfo(torch.float32).max)
    return GroupScales(encode, inner, outer)


def outer_scale(tensor_amax: Tensor, element: ElementFormat) -> Tensor:
    """Return the second scale of ``"e4m3"``, of a tensor with the largest magnitude `tensor_amax`.

    NaN if that is inf or NaN, so that the whole tensor is NaN: no element of it counts as one that became 0.
    """
    outer = tensor_amax / _filled(tensor_amax, E4M3.max * element.max)
    return nan_unless_finite(torch.where(outer == 0, 1.0, outer), tensor_amax)


def _e8m0(amax: Tensor, element: ElementFormat, *, up: bool) -> GroupScales:
    """Find the stored exponent of an e8m0 scale, ``2 ** (stored - 127)``, on the bits of float32."""
    power, emax = exponent_field(_filled(amax, element.max) / amax if up else amax), element.max_exponent
    stored = (254 - power if up else power - emax).clamp(0, 254)
    encode, scale = (_power_of_two(field).clamp(min=2.0**-127) for field in (254 - stored, stored))
    return GroupScales(nan_unless_finite(encode, amax), nan_unless_finite(scale, amax))


def _filled(like: Tensor, value: float) -> Tensor:
    """Return `value` as a tensor: torch divides by a number, or a number by a tensor, in two roundings."""
    return torch.full_like(like, value)


def exponent_field(x: Tensor) -> Tensor:
    """Return the stored exponents, 0 to 255, of float32 values that are not negative, in int32."""
    # `>>` leaves a DTensor as it is: torch takes the op `__rshift__` for one in place, by its last letter.
    return x.view(torch.int32).bitwise_right_shift(23) & 0xFF


def _power_of_two(field: Tensor) -> Tensor:
    """Return the float32 values with the stored exponents `field` and a mantissa of 0: 0 for the field 0."""
    return field.bitwise_left_shift(23).view(torch.float32)


def nan_unless_finite(x: Tensor, amax: Tensor) -> Tensor:
    """Return `x`, NaN where `amax` is inf or NaN."""
    return torch.where(amax.isfinite(), x, torch.nan)
