"""Storage of quantised values and scales in their own bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from amp_core._torch.tensors import uncut
from amp_core.formats.elements import E2M1, ElementFormat
from amp_core.formats.scales import exponent_field


def pack(values: Tensor, element: ElementFormat) -> Tensor:
    """Return float32 values of `element` in its storage.

    fp8 is a tensor of torch's dtype. Other formats are codes in uint8: one per byte, but for e2m1 two per
    byte along the last dimension, the first in the low half.
    """
    if element.is_torchs:
        return values.to(element.dtype)
    return pack_codes(_encode(values, element), element)


def pack_codes(codes: Tensor, element: ElementFormat) -> Tensor:
    """Return codes of `element`, one per uint8, in its storage."""
    if element.is_torchs:
        assert element.dtype is not None
        return codes.view(element.dtype)
    if element != E2M1 or not codes.dim():
        return codes
    if codes.shape[-1] % 2:
        codes = pad(codes, [0, 1])
    low, high = torch.unflatten(uncut(codes, -1, 2), -1, (-1, 2)).unbind(-1)  # DTensors stay shards
    return low | high.bitwise_left_shift(4)


def unpack(packed: Tensor, element: ElementFormat, length: int) -> Tensor:
    """Undo `pack` of values whose last dimension had `length` elements."""
    if element.is_torchs:
        return packed.to(torch.float32)
    if element == E2M1 and packed.dim():
        packed = torch.stack((packed & 0xF, packed.bitwise_right_shift(4)), dim=-1).flatten(-2)[..., :length]
    return _decode(packed, element)


def _encode(values: Tensor, element: ElementFormat) -> Tensor:
    """Return the codes of values that `element` represents, in uint8; NaN becomes 0."""
    values = values.nan_to_num(0.0)
    magnitude = values.abs()
    normal = magnitude.view(torch.int32).bitwise_right_shift(23 - element.mantissa_bits) - _rebias(element)
    subnormal = (magnitude / element.smallest_subnormal).to(torch.int32)
    code = torch.where(magnitude < element.smallest_normal, subnormal, normal)
    return (code | values.signbit().to(torch.int32).bitwise_left_shift(element.bits - 1)).to(torch.uint8)


def _decode(codes: Tensor, element: ElementFormat) -> Tensor:
    code = codes.to(torch.int32)
    magnitude = code & ((1 << element.bits - 1) - 1)
    shifted = (magnitude + _rebias(element)).bitwise_left_shift(23 - element.mantissa_bits)
    normal = shifted.view(torch.float32)
    subnormal = magnitude.to(torch.float32) * element.smallest_subnormal
    value = torch.where(normal < element.smallest_normal, subnormal, normal)
    return torch.where(code.bitwise_right_shift(element.bits - 1) == 1, -value, value)


def _rebias(element: ElementFormat) -> int:
    """Return the excess of float32's exponent bias over that of `element`, at the place of its exponent."""
    return (127 - element.bias) << element.mantissa_bits


def pack_scale(scale: Tensor, kind: str) -> Tensor:
    """Return float32 scales in the dtype of their format, a key of `amp_core.formats.SCALES`."""
    if kind == "e4m3":
        return scale.to(torch.float8_e4m3fn)
    if kind.startswith("e8m0"):
        return exponent_field(scale).to(torch.uint8).view(torch.float8_e8m0fnu)
    return scale
