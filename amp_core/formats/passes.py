"""The passes of quantising over the elements of a tensor, and the portable form of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from amp_core._torch.tensors import beside
from amp_core.common.counter_random import element_numbers, key_of, random_bits
from amp_core.formats.elements import ElementFormat
from amp_core.formats.elementwise import count_nonfinite, round_and_count
from amp_core.formats.groups import Groups
from amp_core.formats.packing import pack, pack_scale
from amp_core.formats.scales import GroupScales, find_scales, nan_unless_finite


class Rounding(NamedTuple):
    """How elements are rounded.

    Attributes:
        element: the format.
        seed: of stochastic rounding; None rounds to nearest even.
        may_overflow: whether products with a scale may be larger than float32 represents.
        may_saturate: whether they may be larger than `element` represents, by more than rounding adds.
        packed: whether the result is in the storage of the format, as `amp_core.formats.packing` defines it.
    """

    element: ElementFormat
    seed: int | Tensor | None
    may_overflow: bool
    may_saturate: bool
    packed: bool


class Passes(ABC):
    """The passes over a tensor's elements; what lies between them is small."""

    @abstractmethod
    def prepare(self, x: Tensor) -> Tensor:
        """Return `x` in the dtype and memory layout that the passes need; it is not written."""

    @abstractmethod
    def largest(self, x: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        """Return the largest magnitudes of groups as `Groups.amax`, and the numbers of inf and of NaN.

        Args:
            x: what `prepare` returned.
            groups: of the shape of `x`.
        """

    def scales(
        self,
        own: Tensor,
        found: Tensor,
        element: ElementFormat,
        kind: str,
        tensor_amax: Tensor,
        *,
        packed: bool,
    ) -> GroupScales:
        """Return the scales that follow from `found`, NaN where `own` is inf or NaN.

        Args:
            own: what `largest` returned first.
            found: the magnitudes that scales follow from, of the same shape.
            element: the format of the elements.
            kind: a key of `SCALES`.
            tensor_amax: see `find_scales`.
            packed: return `GroupScales.scale` in the dtype of its format.
        """
        scales = find_scales(found, element, kind, tensor_amax)
        scale = nan_unless_finite(scales.scale, own)
        return scales._replace(scale=pack_scale(scale, kind) if packed else scale)

    @abstractmethod
    def round(self, x: Tensor, groups: Groups, encode: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
        """Return ``x * encode`` rounded, and how many elements saturated and became 0.

        Args:
            x: what `prepare` returned.
            groups: of the shape of `x`.
            encode: float32, of the shape of the amax of `largest`; NaN where values must be NaN.
            rounding: how.
        """


class PortablePasses(Passes):
    """The passes as PyTorch operations."""

    def prepare(self, x: Tensor) -> Tensor:
        return x.to(torch.float32)

    def largest(self, x: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        return groups.amax(groups.split(x)), count_nonfinite(x)

    def round(self, x: Tensor, groups: Groups, encode: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
        element = rounding.element
        random = _random(x, groups, rounding.seed)
        values, counts = round_and_count(groups.split(x), encode, random, element, rounding.may_overflow)
        values = groups.join(values)
        return pack(values, element) if rounding.packed else values, counts


def _random(x: Tensor, groups: Groups, seed: int | Tensor | None) -> Tensor | None:
    if seed is None:
        return None
    numbers = element_numbers(x.shape, [0] * x.dim(), x.shape, x.device)
    bits = random_bits(numbers, seed if isinstance(seed, Tensor) else key_of(seed), 24)
    return groups.split(beside(bits, x))
