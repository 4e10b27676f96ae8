"""What `Kernels.cast` must do with every kind of number."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from amp_core.testing.suite.judge import Judge

_SPECIAL = (
    0.0, 1.0, 5e-324, 1e-310, 1e-45, 1e-40, 1.1754942e-38, 1.1754944e-38, 5.9e-8, 2.98e-8, 2.99e-8, 6.0e-5,
    6.1e-5, 1e-30, 448.0, 464.0, 465.0, 57344.0, 61440.0, 65504.0, 65519.0, 65520.0, 65536.0, 1e20,
    3.3895314e38, 3.3961775e38, 3.4028235e38, 1e300, float("inf"), float("nan"),
    # Halfway between two neighbours, where the even one is below or above, and slightly beyond.
    *(1 + k * 2.0**-n for n in (3, 4, 8, 9, 11, 12, 24) for k in (1, 3, 1 + 2.0**-12, 1 - 2.0**-12)),
)  # fmt: skip


def _special(dtype: torch.dtype) -> Tensor:
    both = [sign * value for value in _SPECIAL for sign in (1.0, -1.0)]
    return torch.tensor(both, dtype=torch.float64).to(dtype)


def _patterns(dtype: torch.dtype) -> Tensor:
    """Return every kind of number: random exponents, random mantissas."""
    generator = torch.Generator().manual_seed(11)
    exponent = torch.randint(-45, 39, (1031,), generator=generator).double()
    mantissa = torch.randn(1031, generator=generator, dtype=torch.float64)
    return (mantissa * 10.0**exponent).to(dtype)


class CastConformance(Judge):
    """A cast has one right result, bit for bit."""

    AREA = "cast"

    def test_cast_rounds_every_dtype_pair_to_nearest_even(self) -> None:
        """Ties, overflow to inf, NaN, signed zeros and subnormals: each has one right result."""
        for source, target in itertools.product(self._cast_dtypes(), repeat=2):
            self._judge_cast([self._computable(_special(source)).to(self.device)], target)

    def test_cast_is_exact_for_numbers_of_every_size(self) -> None:
        """Numbers over the whole range of exponents."""
        for source, target in itertools.product(self._cast_dtypes(), repeat=2):
            values = self._computable(_patterns(source)).to(self.device)
            self._judge_cast([values], target)
            self._judge_cast([values], target, [torch.empty_like(values, dtype=target)])

    def test_cast_keeps_nan_inf_and_signed_zero(self) -> None:
        """A NaN must stay a NaN whatever its payload; its upper bits may all be zero."""
        payloads = torch.tensor(
            [0x7F800001, 0x7F80FFFF, -0x7FFFFF, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32
        )
        values = torch.cat([payloads.view(torch.float32), torch.tensor([-0.0, float("inf"), float("-inf")])])
        for target in self.dtypes():
            self._judge_cast([values.to(self.device)], target)

    def test_cast_refuses_an_out_of_other_shapes_before_it_writes(self) -> None:
        """A target that is missing, or that a tensor could be broadcast into, must not pass silently."""
        for shapes in ([(3,)], [(3,), (5,)], [(3,), (1,), (2,)], [(3,), ()], [(3,), (1, 1)]):
            tensors = [torch.ones(n, device=self.device) for n in (3, 1)]
            out = [torch.zeros(shape, dtype=self._low, device=self.device) for shape in shapes]
            with self._refused(f"cast of shapes [(3,), (1,)] into out= of {shapes}", [*tensors, *out]):
                self.kernels.cast(tensors, self._low, out=out)
        self._judge_cast(tensors, self._low, what="after a call that was refused:")
