"""What `Kernels.grad_stats` must do with every kind of number and list."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_core.kernels import GradStats
from amp_core.testing.suite import data
from amp_core.testing.suite.judge import Judge
from amp_core.testing.suite.multiply import BAD
from amp_core.testing.suite.tensors import LENGTHS, chunk_edges

ORDERS = (2.0, 1.0, 3.0, 0.5, 2.5, math.inf)
RARE_ORDERS = (2, 3, 0.25, 0.75, 1.25, 1.5, 4.0, 6.0, 10.0, 12.0)


class GradStatsConformance(Judge):
    """One read of the gradients: their norms, and which of them contain an inf or a NaN."""

    AREA = "grad_stats"

    def _measured(self, tensors: Sequence[Tensor], *orders: float) -> None:
        for order in orders or (2.0,):
            self._judge_stats([t.to(self.device) for t in tensors], order)

    def test_grad_stats_norms_of_every_dtype_and_order(self) -> None:
        """The per-tensor and total norms, for the orders that clipping uses."""
        for dtype in self._gradient_dtypes():
            self._measured([data.random((n,), dtype, n) for n in LENGTHS], *ORDERS, *RARE_ORDERS)
            self._measured([data.random((129,), dtype)], *ORDERS)

    def test_grad_stats_flags_a_bad_element_at_every_position(self) -> None:
        """First, last, and every place in a vector and its tail; the clean tensors beside it stay clean."""
        for dtype in self.dtypes():
            tensors = []
            for length in (n for n in LENGTHS if n <= 65):
                for position in range(length):
                    tensors += [torch.ones(length, dtype=dtype), torch.ones(length, dtype=dtype)]
                    tensors[-2][position] = BAD[position % 3]
            self._measured(tensors)

    def test_grad_stats_flags_each_kind_of_bad_element_alone(self) -> None:
        """An inf, -inf or NaN, in a call of one tensor, for every order; the norm is inf or NaN with it."""
        for dtype in self._gradient_dtypes():
            for bad in BAD:
                for length, position in ((1, 0), (2, 1), (17, 16), (64, 63), (130, 128)):
                    tensor = torch.ones(length, dtype=dtype)
                    both = torch.tensor(complex(1.0, bad)) if dtype.is_complex and length % 2 else bad
                    tensor[position] = both
                    self._measured([tensor], *ORDERS)
                    self._measured([torch.ones(3, dtype=dtype), tensor], 2.0, math.inf)

    def test_grad_stats_of_mixed_lists(self) -> None:
        """The dtype of the norms follows the widest tensor; a clean tensor never hides a bad one."""
        dtypes = self._gradient_dtypes()
        for start in range(len(dtypes)):
            order = [*dtypes[start:], *dtypes[:start]] * 2
            tensors = [torch.full((i + 1,), float(i + 1), dtype=d) for i, d in enumerate(order)]
            tensors.insert(3, torch.empty(0))
            self._measured(tensors, 2.0, math.inf)
            tensors[0][-1] = math.nan
            self._measured(tensors)
        self._measured([torch.full((n,), math.inf, dtype=d) for n in (1, 5, 40) for d in dtypes])

    def test_grad_stats_finds_one_bad_element_among_millions(self) -> None:
        """Around every place where a kernel may cut a tensor into chunks."""
        tensor = torch.ones(self.large_numel, device=self.device)
        for number, position in enumerate(chunk_edges(self.large_numel)):
            tensor[position] = BAD[number % 3]
            assert float(self.kernels.grad_stats([tensor]).found_inf) == 1.0, (
                f"found_inf misses a bad element at {position}"
            )
            tensor[position] = 1.0
        self._measured([tensor])

    def test_grad_stats_of_large_and_small_numbers(self) -> None:
        """Squares overflow or vanish where numbers do not; a norm that overflows does not flag its tensor."""
        big, small = torch.tensor([1e20, -1e20, 3.0]), torch.full((4,), 1e-30)
        lists = [[big], [torch.tensor([1e25])], [torch.tensor([3e38])], [big, torch.ones(3)], [small]]
        lists += [[small, torch.tensor([2e-25])], [torch.tensor([-0.0])], [torch.full((16,), 3e38)]]
        lists += [[torch.full((1,), 3e38)] * 16]
        for tensors in lists:
            self._measured(tensors, 2.0, 1.0, 3.0, math.inf)
        for dtype in self.dtypes():
            info = torch.finfo(dtype)
            values = torch.tensor([-0.0, 0.0, info.smallest_normal, info.max, info.min], dtype=dtype)
            self._measured([values, torch.full((3,), -0.0, dtype=dtype)], math.inf)
            if dtype.itemsize == 2:  # a sum in the dtype itself overflows or stalls
                self._measured([torch.full((70_001,), 3.0, dtype=dtype)])
                self._measured([torch.full((300,), 60000.0, dtype=dtype)])
        if self.keeps_subnormals:
            stats = self._judge_stats([torch.full((4,), 1e-40).to(self.device)])
            assert math.isclose(float(stats.norm), 2e-40, rel_tol=1e-3)
            self._judge_norms_of_subnormals()
        self._judge_flags_of_large_numbers()

    def _judge_norms_of_subnormals(self) -> None:
        """Small float16 gradients are subnormal long before they vanish; a norm of zeros clips nothing."""
        for dtype in self.dtypes():
            if dtype is not torch.float64:  # whose squares are zero, and whose norms are as small as an error
                tiny = torch.finfo(dtype).smallest_normal
                values = torch.tensor([tiny / 2, -tiny / 4, tiny / 8], dtype=dtype)
                self._measured([values], 2.0, 1.0, 3.0, math.inf)

    def _judge_flags_of_large_numbers(self) -> None:
        """Powers, sums and moduli of the largest numbers overflow every dtype: no reason to skip a step."""
        for dtype in self._gradient_dtypes():
            top = torch.finfo(dtype).max
            values = torch.full((33,), complex(top, -top) if dtype.is_complex else top, dtype=dtype)
            for order in (2.0, 1.0, 0.25, 3.0, 10.0, math.inf):
                stats = self.kernels.grad_stats([values.to(self.device)], order)
                flags = float(stats.nonfinite), float(stats.found_inf)
                assert flags == (0.0, 0.0), (
                    f"nonfinite and found_inf are {flags} for the largest numbers of {dtype}, with the order "
                    f"{order}: an overflow of the norm, or of a modulus, is none of a gradient"
                )

    def test_grad_stats_of_nothing(self) -> None:
        """No gradients, or none with an element: norm 0, no flag, and the promised shapes."""
        values = torch.tensor([3.0, 4.0])
        none = torch.empty(0), torch.empty(2, 0)
        for tensors in ([], [none[0]], [*none], [none[0], values, none[1]]):
            self._measured(tensors, 2.0, math.inf)
        with data.default_dtype(torch.float64):
            self._measured([])

    def test_grad_stats_results_are_the_callers_own(self) -> None:
        """A result must not change with the next call."""
        for given in ([3.0, 4.0], []):
            stats: list[GradStats] = []
            for values in (given, [math.inf], []):
                stats.append(
                    self.kernels.grad_stats([torch.tensor(values).to(self.device)] if values else [])
                )
                stats[-1].found_inf.add_(10.0 * len(stats))
            assert math.isclose(float(stats[0].norm), 5.0 if given else 0.0, rel_tol=self.norm_rtol)
            assert [float(s.found_inf) for s in stats] == [10.0, 21.0, 30.0]

    def test_grad_stats_is_the_same_every_time(self) -> None:
        """Bit for bit on the same input."""
        tensors = [data.random((n,), d, n).to(self.device) for n in (1, 1000, 70_001) for d in self.dtypes()]
        first, second = self.kernels.grad_stats(tensors), self.kernels.grad_stats(tensors)
        pairs = zip(data.statistics(first), data.statistics(second), strict=True)
        assert all(data.same_bits(a, b) for a, b in pairs)
