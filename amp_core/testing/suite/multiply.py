"""What `Kernels.multiply_` must do with every kind of number, factor and flag."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_core.testing.suite import data, reference
from amp_core.testing.suite.judge import Judge
from amp_core.testing.suite.tensors import LENGTHS, chunk_edges

BAD = (math.inf, -math.inf, math.nan)
# 7, 13 and 14: the reciprocal of their reciprocal is another float32 number.
FACTORS = (1.0, 0.5, 1 / 65536, 1 / 3, 3.0, 0.0, -1.0, 1e-9, 7.0, 13 / 1024, 131072.0)


class MultiplyConformance(Judge):
    """One multiplication in place, and the flag of what is not finite before or after it."""

    AREA = "multiply"

    def _scaled(self, values: Sequence[Tensor], factor: float, flag: float | None = 0.0) -> None:
        self._judge_multiply([v.clone().to(self.device) for v in values], factor, flag)

    def test_multiply_works_in_float32_or_wider(self) -> None:
        """A factor rounded to float16 first, or a product rounded twice, is off."""
        for dtype in self._gradient_dtypes():
            values = [data.random((n,), dtype, n) for n in LENGTHS]
            for factor in FACTORS:
                self._scaled(values, factor)
                self._scaled(values[-1:], factor, None)

    def test_multiply_flags_a_bad_element_at_every_position(self) -> None:
        """First, last, and every place in a vector and its tail, before or after the product."""
        for dtype in self.dtypes():
            for length in (1, 2, 7, 16, 17, 33):
                for position in range(length):
                    values = torch.ones(length, dtype=dtype)
                    values[position] = BAD[position % 3]
                    self._scaled([values], FACTORS[position % len(FACTORS)])
                    values[position] = torch.finfo(dtype).max
                    self._scaled([values], 4.0)

    def test_multiply_flags_one_bad_element_among_millions(self) -> None:
        """Around every place where a kernel may cut a tensor into chunks."""
        values = torch.ones(self.large_numel, device=self.device)
        one, flag = data.scalar(1.0, self.device), data.scalar(0.0, self.device)
        for number, position in enumerate(chunk_edges(self.large_numel)):
            values[position] = BAD[number % 3]
            self.kernels.multiply_([values], one, flag.zero_())
            assert float(flag) == 1.0, f"found_inf misses a bad element at {position}"
            values[position] = 1.0
        self.kernels.multiply_([values.fill_(1.0)], data.scalar(0.5, self.device), flag.zero_())
        assert float(flag) == 0.0
        assert bool(((values - 0.5).abs() <= self.product_ulps * 2.0**-24).cpu().all())

    def test_multiply_of_special_numbers(self) -> None:
        """Large, small, signed zero, subnormal, inf and NaN, each alone and all: kept, scaled and flagged."""
        for dtype in self._gradient_dtypes():
            info = torch.finfo(dtype)
            below = [info.smallest_normal / 2, info.smallest_normal / 4] if self.keeps_subnormals else []
            numbers = [info.max, info.min, info.smallest_normal, *below, 0.0, -0.0, 1.0]
            finite, everything = (torch.tensor(n * 3, dtype=dtype) for n in (numbers, [*numbers, *BAD]))
            tiny = (1e-30, 1e-40) if self.keeps_subnormals else (1e-30,)
            for factor in (*FACTORS, 2.0, -0.0, 3e38, *tiny, math.inf, -math.inf, math.nan):
                self._scaled([finite, torch.empty(0)], factor)
                self._scaled([everything], factor)
                good: list[Tensor] = []  # together, as one bad number sets the flag of all
                for number in torch.split(everything[: len(numbers) + 3], 1):
                    if reference.nonfinite(reference.product(number, factor)):
                        self._scaled([number], factor)
                    else:
                        good.append(number)
                self._scaled(good, factor)
        if self.supports_complex:
            for bad in (1.0, complex(1.0, math.inf), complex(math.nan, 1.0)):
                values = data.random((17,), torch.complex64)
                values[16] = torch.tensor(bad)
                self._scaled([values], 0.5)
            top = torch.finfo(torch.float32).max  # of which the parts are finite, and the modulus is not
            for large in (complex(top, top), complex(-top, top / 2)):
                self._scaled([torch.full((3,), large, dtype=torch.complex64)], 1.0)

    def test_multiply_sets_the_flag_of_a_list(self) -> None:
        """The flag is no count, a clean call leaves it set, and so does a clean dtype after a bad one."""
        dtypes = self.dtypes() * 2
        for bad in range(len(dtypes)):
            values = [torch.ones(5, dtype=d) for d in dtypes]
            values[bad][4] = math.inf
            for flag in (0.0, 1.0, 3.0):  # a sum over ranks
                self._scaled(values, 0.5, flag)
        everything = [torch.full((n,), math.inf, dtype=d) for n in (1, 9) for d in self.dtypes()]
        for values in (everything, [torch.ones(3)], [], [torch.empty(0)], [torch.tensor([math.nan])]):
            for flag in (0.0, 1.0, 3.0):
                self._scaled(values, 0.5, flag)
        self._judge_factors_and_flags_of_every_kind()

    def _judge_factors_and_flags_of_every_kind(self) -> None:
        """One element has any number of dimensions; a flag holds any number, which a clean call leaves."""
        values = [torch.ones(n, dtype=d) for n, d in enumerate(self.dtypes(), 3)]
        shapes = itertools.product(((), (1,), (1, 1), (1, 1, 1)), repeat=2)
        flags = itertools.cycle((-1.0, math.nan, 0.5, -math.inf, math.inf))
        for (number, (shape, flag_shape)), bad in itertools.product(enumerate(shapes), (False, True)):
            grads = [v.to(self.device, copy=True) for v in values]
            if bad:
                grads[number % len(grads)][-1] = BAD[number % 3]
            self._judge_multiply(grads, 0.5, next(flags), shape, flag_shape=flag_shape)
