"""How one operand is quantised, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from amp_core.common.arguments import is_count
from amp_core.formats.elements import ELEMENTS, ElementFormat
from amp_core.formats.scales import SCALES

Granularity = Literal["tensor", "row"] | int | tuple[int, int]
"""What shares a scale: the tensor, a row along the contracted dimension, a block of n elements of it, or a
tile of m rows by n."""


@dataclass(frozen=True)
class Delayed:
    """The scale of a tensor follows from the largest magnitudes of earlier steps.

    Attributes:
        history: the number of steps to look back on.
        margin: the largest magnitude maps to ``max / 2**margin``.
        algorithm: ``"max"`` takes the largest magnitude of the history, ``"most_recent"`` the last one.

    Raises:
        ValueError: a value is out of range.
    """

    history: int = 1024
    margin: int = 0
    algorithm: Literal["max", "most_recent"] = "max"

    def __post_init__(self) -> None:
        if not is_count(self.history):
            raise ValueError(f"history must be a number of steps above 0, got {self.history!r}.")
        if not isinstance(self.margin, int) or isinstance(self.margin, bool) or abs(self.margin) > 64:
            raise ValueError(f"margin must be an integer from -64 to 64, got {self.margin!r}.")
        if self.algorithm not in ("max", "most_recent"):
            raise ValueError(f"algorithm must be 'max' or 'most_recent', got {self.algorithm!r}.")


@dataclass(frozen=True)
class Quantization:
    """How one operand of a matrix product is quantised.

    Attributes:
        element: the format of the elements.
        granularity: what shares a scale: ``"tensor"``; ``"row"``, all that is summed for one element of the
            product; ``n``, blocks of n elements of a row; ``(m, n)``, tiles of m rows by n elements.
        scale: the format of the scales, a key of `amp_core.formats.SCALES`.
        found: ``"current"``: from the tensor itself; or `Delayed`.
        rounding: ``"nearest"``, ties to even, or ``"stochastic"``.
        hadamard: the size of the blocks of a row that a random Hadamard transform spreads outliers over
            before they are rounded; a power of two. None transforms nothing.

    Raises:
        TypeError: `element` is not an `ElementFormat`.
        ValueError: a field has no valid value, or two contradict each other.
    """

    element: ElementFormat
    granularity: Granularity = "tensor"
    scale: str = "float32"
    found: Literal["current"] | Delayed = "current"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    hadamard: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.element, ElementFormat):
            raise TypeError(
                f"element must be an ElementFormat: {', '.join(map(str.upper, ELEMENTS))} of "
                f"amp_core.formats, not their names or dtypes; got {self.element!r}."
            )
        if not _is_granularity(self.granularity):
            raise ValueError(
                f"granularity must be 'tensor', 'row', a block size n or a tile (m, n), "
                f"got {self.granularity!r}."
            )
        if not isinstance(self.scale, str) or self.scale not in SCALES:
            raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {self.scale!r}.")
        if self.scale == "e4m3" and self.granularity == "tensor":
            raise ValueError("An e4m3 scale stands under a float32 one per tensor: choose blocks or tiles.")
        if self.found != "current" and not isinstance(self.found, Delayed):
            raise ValueError(f"found must be 'current' or a Delayed, got {self.found!r}.")
        if isinstance(self.found, Delayed) and self.granularity != "tensor":
            raise ValueError(f"Delayed scales are per tensor, not per {self.granularity!r}.")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding must be 'nearest' or 'stochastic', got {self.rounding!r}.")
        if self.hadamard is not None and not _is_power_of_two(self.hadamard):
            raise ValueError(f"hadamard must be a power of two above 1, or None, got {self.hadamard!r}.")


def _is_granularity(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and all(map(is_count, value))
    return value in ("tensor", "row") or is_count(value)


def _is_power_of_two(value: object) -> bool:
    return isinstance(value, int) and value > 1 and value & (value - 1) == 0
