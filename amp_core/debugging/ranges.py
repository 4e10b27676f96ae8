"""The ranges of tensors, and of floating-point formats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_core.common.text import dtype_name
from amp_core.debugging.tables import as_share
from amp_core.debugging.values import extent, in_parts, wide

KINDS = ("activation", "gradient", "weight", "weight gradient")


@dataclass(frozen=True)
class Extent:
    """The range of a tensor.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        smallest: the smallest nonzero magnitude.
        largest: the largest finite magnitude.
        not_finite: the share of its elements that are inf or NaN.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    smallest: float
    largest: float
    not_finite: float

    @classmethod
    def of(cls, tensor: Tensor) -> Extent:
        """Measure a tensor."""
        flat = wide(in_parts(tensor.detach())).reshape(-1).abs()
        largest, count = extent(flat)
        nonzero = flat[(flat > 0) & flat.isfinite()]
        smallest = float(nonzero.min()) if nonzero.numel() else 0.0
        return cls(tensor.dtype, tuple(tensor.shape), smallest, largest, count / max(1, flat.numel()))

    def __str__(self) -> str:
        bad = f", {as_share(self.not_finite)} inf or NaN" if self.not_finite else ""
        span = f"magnitudes {self.smallest:.3g} to {self.largest:.3g}"
        return f"{dtype_name(self.dtype)} {[*self.shape]}, {span}{bad}"


@dataclass(frozen=True)
class Format:
    """The range of a floating-point format, in exponents of 2.

    Attributes:
        name: its name.
        subnormal: the exponent of its smallest number.
        normal: the exponent of its smallest normal number.
        largest: the exponent of its largest number.
    """

    name: str
    subnormal: int
    normal: int
    largest: int

    @classmethod
    def of(cls, what: torch.dtype | tuple[int, int]) -> Format:
        """Return the format of a dtype, or of (bits of the exponent, bits of the mantissa) as in IEEE 754.

        Raises:
            TypeError: it is neither, or a dtype whose range torch does not know, such as one of integers.
            ValueError: there are no such numbers of bits.
        """
        if isinstance(what, torch.dtype) and (what.is_floating_point or what.is_complex):
            return cls._of_dtype(what)
        if not isinstance(what, (tuple, list)) or [*map(type, what)] != [int, int]:
            raise TypeError(
                f"format= must be a floating-point dtype, or the bits of exponent and mantissa, such as "
                f"(4, 3), not {what!r}."
            )
        bits, mantissa = what
        if not (2 <= bits <= 15 and mantissa >= 0):
            raise ValueError(
                f"format={what!r}: a format has 2 to 15 bits of exponent, and 0 or more of mantissa."
            )
        bias = 2 ** (bits - 1) - 1
        return cls(f"e{bits}m{mantissa}", 1 - bias - mantissa, 1 - bias, bias)

    @classmethod
    def _of_dtype(cls, dtype: torch.dtype) -> Format:
        info = torch.finfo(dtype)
        try:
            smallest = info.smallest_normal
        except NotImplementedError:
            raise TypeError(
                f"format={dtype}: torch does not know the range of this dtype. Pass the bits of its exponent "
                f"and mantissa, such as (2, 1) for e2m1."
            ) from None
        normal, subnormal = math.log2(smallest), math.log2(smallest * info.eps)
        return cls(dtype_name(dtype), round(subnormal), round(normal), math.frexp(info.max)[1] - 1)

    def underflow(self, entry: Entry) -> float:
        """Return the share of nonzero values that would round to 0."""
        return entry.share(lambda exponent: exponent < self.subnormal - 1)

    def saturation(self, entry: Entry) -> float:
        """Return the share of nonzero values whose exponent is too large, and of inf and NaN.

        Values beyond the largest number that have its exponent do not count: those above 448 and below 512
        for float8_e4m3fn.
        """
        return entry.share(lambda exponent: exponent > self.largest)


@dataclass(frozen=True)
class Entry:
    """One tensor in one step.

    Attributes:
        step: the training step, from 0.
        kind: ``activation``, ``gradient`` (of an activation, with the loss scale), ``weight`` or
            ``weight gradient``.
        name: the module, as in ``named_modules()``, or the parameter.
        dtype: the tensor's dtype.
        exponents: how many sampled values have each exponent of 2; without 0, inf and NaN.
        zeros: how many sampled values are 0.
        not_finite: how many sampled values are inf or NaN.
        largest: the largest finite magnitude of the whole tensor.
    """

    step: int
    kind: str
    name: str
    dtype: str
    exponents: dict[int, int]
    zeros: int
    not_finite: int
    largest: float

    def share(self, counts: Callable[[float], bool]) -> float:
        """Return the share of the values whose exponent counts; inf and NaN have the exponent infinity."""
        chosen = sum(n for exponent, n in self.exponents.items() if counts(exponent))
        chosen += self.not_finite if counts(math.inf) else 0
        return chosen / max(1, sum(self.exponents.values()) + self.not_finite)
