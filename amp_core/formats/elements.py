"""Element formats of 8, 6 and 4 bits, and how float32 is rounded to them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_core.common.arguments import as_whole, check_dtype

_EXPONENT = 0x7F800000
"""The exponent bits of a float32: a value with the others cleared is the power of two below it."""

_RANDOM_BITS = 24
"""A float32 holds each multiple of 2**-24 below 1."""

_SMALLEST, _LARGEST = 2.0**-126, 2.0**118
"""Within float32: from its smallest normal value up to 448 times less than its range, for scales in e4m3."""


@dataclass(frozen=True)
class ElementFormat:
    """A narrow floating-point format: a sign, `exponent_bits` and `mantissa_bits`.

    Attributes:
        name: as in ``"e4m3"``.
        exponent_bits: the number of exponent bits.
        mantissa_bits: the number of mantissa bits, the implicit one not counted.
        bias: what is subtracted from the stored exponent.
        max: the largest finite value.
        has_inf: whether it represents inf.
        has_nan: whether it represents NaN.
        dtype: torch's dtype; None if torch has none, as for 6 bits.

    Raises:
        TypeError: the bits or `bias` are no integers, or `dtype` is no dtype.
        ValueError: it has more than 8 bits or no exponent, `max` is none of its values, `dtype` does not
            hold them, or float32 does not.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    has_inf: bool
    has_nan: bool
    dtype: torch.dtype | None

    def __post_init__(self) -> None:
        for field in ("exponent_bits", "mantissa_bits", "bias"):
            as_whole(getattr(self, field), field)
        if self.dtype is not None:
            check_dtype(self.dtype, "dtype")
        if self.bits > 8 or self.exponent_bits < 1 or self.mantissa_bits < 0:
            raise ValueError(
                f"An element has a sign, at least one exponent bit, and at most 8 bits in all; {self.name} "
                f"has {self.exponent_bits} exponent bits and {self.mantissa_bits} mantissa bits."
            )
        step = max(2.0 ** (self.max_exponent - self.mantissa_bits), self.smallest_subnormal)
        beyond = 2.0 ** (2**self.exponent_bits - self.bias)
        if not (0 < self.max < beyond and (self.max / step).is_integer()):
            raise ValueError(f"max of {self.name} must be one of its values, got {self.max!r}.")
        if self.smallest_subnormal < _SMALLEST or self.max > _LARGEST:
            raise ValueError(
                f"{self.name} has values from {self.smallest_subnormal:g} to {self.max:g}, and quantising "
                f"computes in float32: choose a bias that leaves them within 2**-126 and 2**118."
            )
        if self.bits == 8 and self.dtype is not None and not self._fits(torch.finfo(self.dtype)):
            raise ValueError(f"{self.dtype} does not hold the values of {self.name}; pass dtype=None.")

    def _fits(self, wide: torch.finfo) -> bool:
        least = wide.smallest_normal * wide.eps
        precise = wide.eps <= 2.0**-self.mantissa_bits and least <= self.smallest_subnormal
        return precise and wide.min <= -self.max and self.max <= wide.max

    @property
    def is_torchs(self) -> bool:
        """Whether values are stored in `dtype`; otherwise as codes."""
        return self.bits == 8 and self.dtype is not None and self.dtype.itemsize == 1

    @property
    def bits(self) -> int:
        """The number of bits of one element."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def max_exponent(self) -> int:
        """The exponent of `max`; ``emax`` in the OCP MX specification."""
        return math.frexp(self.max)[1] - 1

    @property
    def smallest_normal(self) -> float:
        """The smallest normal value."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest value above 0."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    def round(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Round to values of this format. Larger finite values become `max`.

        Args:
            x: float32; not written.
            random: integers from 0 to 2**24 - 1, of the shape of `x`, for stochastic rounding; None rounds
                to the nearest value, ties to even.

        Returns:
            float32, of the shape of `x`. NaN stays NaN. inf stays inf, or is NaN if the format has no inf.

        Raises:
            TypeError: `x` is no float32 tensor.
        """
        if not isinstance(x, Tensor) or x.dtype is not torch.float32:  # whose bits rounding reads
            given = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{self.name} rounds tensors of float32, not {given}: pass tensor.float().")
        rounded = self.saturate(self.round_unbounded(x, random))
        return torch.where(x.isinf(), x, rounded) if self.has_inf else rounded

    def saturate(self, x: Tensor) -> Tensor:
        """Limit the magnitude to `max`; NaN stays."""
        return x.clamp(-self.max, self.max)

    def round_unbounded(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Round as `round` does to a format whose exponent has no upper limit; inf becomes NaN."""
        power = (x.view(torch.int32) & _EXPONENT).view(torch.float32).clamp(min=self.smallest_normal)
        step = power * 2.0**-self.mantissa_bits
        steps = x / step  # exact, as is the product below: `step` is a power of two
        return (steps.round() if random is None else _stochastic(steps, random)) * step


def _stochastic(steps: Tensor, random: Tensor) -> Tensor:
    """Round away from zero with the fraction as probability, rounded up to a multiple of 2**-24."""
    magnitude = steps.abs()
    whole = magnitude.floor()
    away = random.to(torch.float32) * 2.0**-_RANDOM_BITS < magnitude - whole  # exact
    return (whole + away).copysign(steps)


E4M3 = ElementFormat("e4m3", 4, 3, 7, 448.0, has_inf=False, has_nan=True, dtype=torch.float8_e4m3fn)
"""OCP OFP8 E4M3: no inf, two NaN codes."""

E5M2 = ElementFormat("e5m2", 5, 2, 15, 57344.0, has_inf=True, has_nan=True, dtype=torch.float8_e5m2)
"""OCP OFP8 E5M2: as IEEE 754, with inf and NaN."""

E3M2 = ElementFormat("e3m2", 3, 2, 3, 28.0, has_inf=False, has_nan=False, dtype=None)
"""OCP MX FP6 E3M2: all codes are finite."""

E2M3 = ElementFormat("e2m3", 2, 3, 1, 7.5, has_inf=False, has_nan=False, dtype=None)
"""OCP MX FP6 E2M3: all codes are finite."""

E2M1 = ElementFormat("e2m1", 2, 1, 1, 6.0, has_inf=False, has_nan=False, dtype=torch.float4_e2m1fn_x2)
"""OCP MX FP4 E2M1: all codes are finite. torch's dtype holds two of them."""

ELEMENTS = {element.name: element for element in (E4M3, E5M2, E3M2, E2M3, E2M1)}
"""The element formats by name."""
