"""What `Kernels.grad_stats` must do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from amp_core.kernels import PORTABLE, GradStats
from amp_core.testing.fixtures import BackendFixtures
from amp_core.testing.suite import data

BAD = (math.inf, -math.inf, math.nan)


def reference_norm(tensor: Tensor, order: float) -> float:
    """Return the norm, computed in float64 on the CPU."""
    wide = tensor.detach().cpu().to(torch.complex128 if tensor.is_complex() else torch.float64).abs()
    if wide.numel() == 0:
        return 0.0
    top = float(wide.max())
    if math.isinf(order) or top == 0 or not math.isfinite(top):
        return top
    return float(top * ((wide / top) ** order).sum() ** (1 / order))


def total(norms: list[float], order: float) -> float:
    """Return the norm of norms."""
    return reference_norm(torch.tensor(norms, dtype=torch.float64), order)


class GradStatsConformance(BackendFixtures):
    """One read of the gradients: their norms, and which of them hold an inf or a NaN."""

    AREA = "grad_stats"

    def _measure(self, tensors: list[Tensor], order: float = 2.0) -> GradStats:
        return self.kernels.grad_stats([t.to(self.device) for t in tensors], order)

    def _assert_norms(self, tensors: list[Tensor], order: float = 2.0) -> GradStats:
        found = self._measure(tensors, order)
        expected = [reference_norm(t, order) for t in tensors]
        norms = found.norms.double().cpu().tolist()
        assert norms == pytest.approx(expected, rel=self.norm_rtol, abs=0.0), f"norms of order {order}"
        assert float(found.norm) == pytest.approx(total(expected, order), rel=self.norm_rtol, abs=0.0)
        return found

    def _assert_finite(self, found: GradStats) -> None:
        assert float(found.found_inf) == 0.0, "found_inf is set though everything is finite"
        assert float(found.nonfinite.sum()) == 0.0

    def test_grad_stats_gives_the_promised_shapes_dtypes_and_device(self) -> None:
        """The scaler and the clipping code index and combine these tensors."""
        for dtype in self.dtypes():
            found = self._measure([data.random((4,), dtype), data.random((2, 3), dtype)])
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            assert (found.norm.shape, found.norm.dtype) == ((), wide)
            assert (found.norms.shape, found.norms.dtype) == ((2,), wide)
            assert (found.nonfinite.shape, found.nonfinite.dtype) == ((2,), torch.float32)
            assert (found.found_inf.shape, found.found_inf.dtype) == ((), torch.float32)
            assert {t.device.type for t in vars(found).values()} == {self.device_type}

    def test_grad_stats_norms_of_every_dtype_and_order(self) -> None:
        """The per-tensor and total norms, for the orders that clipping uses."""
        for dtype in self.dtypes():
            tensors = [data.random((n,), dtype, n) for n in data.LENGTHS]
            for order in (2.0, 1.0, 3.0, 0.5, math.inf):
                self._assert_finite(self._assert_norms(tensors, order))

    def test_grad_stats_accumulates_low_precision_in_float32(self) -> None:
        """A sum kept in float16 overflows or stalls after some thousand elements."""
        for dtype in (d for d in self.dtypes() if d.itemsize == 2):
            self._assert_finite(self._assert_norms([torch.full((70_001,), 3.0, dtype=dtype)]))
            self._assert_finite(self._assert_norms([torch.full((300,), 60000.0, dtype=dtype)]))

    def test_grad_stats_norms_of_every_memory_layout(self) -> None:
        """Each element counts once, those between and around do not."""
        for dtype in self.dtypes():
            for name, tensor in data.layouts(dtype, self.device):
                found = self.kernels.grad_stats([tensor])
                expected = reference_norm(tensor, 2.0)
                assert float(found.norm) == pytest.approx(expected, rel=self.norm_rtol, abs=0.0), (
                    f"{name}, {dtype}"
                )
                assert float(found.found_inf) == 0.0, f"{name}, {dtype}"

    def test_grad_stats_of_an_expanded_tensor_counts_repetitions(self) -> None:
        """The gradient of a sum is one element, seen many times."""
        tensor = torch.tensor([2.0]).to(self.device).expand(100)
        assert float(self.kernels.grad_stats([tensor]).norm) == pytest.approx(
            20.0, rel=self.norm_rtol, abs=0.0
        )

    def test_grad_stats_does_not_read_around_a_view(self) -> None:
        """A view's neighbours, here NaN, belong to somebody else."""
        for dtype in self.dtypes():
            for step in (1, 2):
                values = [data.random((n,), dtype, n) for n in data.LENGTHS]
                made = [data.guarded(v, self.device, step, fill=math.nan) for v in values]
                found = self.kernels.grad_stats([g.tensor for g in made])
                self._assert_finite(found)
                expected = total([reference_norm(v, 2.0) for v in values], 2.0)
                assert float(found.norm) == pytest.approx(expected, rel=self.norm_rtol, abs=0.0)

    def test_grad_stats_flags_a_bad_element_at_every_position(self) -> None:
        """First, last, and every place in a vector and its tail; the clean tensors beside it stay clean."""
        for dtype in self.dtypes():
            tensors, marks = [], []
            for length in (n for n in data.LENGTHS if n <= 65):
                for position in range(length):
                    tensors.append(torch.ones(length, dtype=dtype))
                    tensors[-1][position] = BAD[position % 3]
                    tensors.append(torch.ones(length, dtype=dtype))
                    marks += [1.0, 0.0]
            found = self._measure(tensors)
            wrong = [
                i for i, (a, b) in enumerate(zip(found.nonfinite.tolist(), marks, strict=True)) if a != b
            ]
            assert not wrong, f"{dtype}: {tensors[wrong[0]]} is flagged {1 - marks[wrong[0]]}"
            assert float(found.found_inf) == 1.0

    def test_grad_stats_flags_a_bad_element_in_every_memory_layout(self) -> None:
        """No dimensions, strides, odd offsets: the last element is looked at like the first."""
        for dtype in self.dtypes():
            for name, tensor in data.layouts(dtype, self.device):
                for place in (0, -1) if tensor.numel() else ():
                    bad = tensor.clone(memory_format=torch.preserve_format)
                    tensor[data.index(tensor, place)] = math.inf
                    found = self.kernels.grad_stats((tensor,))
                    assert float(found.found_inf) == 1.0, f"{name}, {dtype}, element {place}"
                    tensor.copy_(bad)

    def test_grad_stats_flags_each_kind_of_bad_element_alone(self) -> None:
        """An inf, -inf or NaN, in a call of one tensor, for every order."""
        for dtype in self.dtypes():
            for bad in BAD:
                for length, position in ((1, 0), (2, 1), (17, 16), (64, 63), (130, 128)):
                    tensor = torch.ones(length, dtype=dtype)
                    tensor[position] = bad
                    for order in (2.0, 1.0, 3.0, math.inf):
                        found = self._measure([tensor], order)
                        assert float(found.found_inf) == 1.0, f"{bad} at {position} of {length}, {dtype}"
                        assert found.nonfinite.tolist() == [1.0]
                        assert not math.isfinite(float(found.norm)), f"norm of order {order} hides the {bad}"

    def test_grad_stats_found_inf_is_zero_or_one(self) -> None:
        """Many bad elements and tensors: the flag is no count."""
        tensors = [torch.full((n,), math.inf, dtype=d) for n in (1, 5, 40) for d in self.dtypes()]
        found = self._measure([*tensors, torch.ones(3)])
        assert float(found.found_inf) == 1.0
        assert found.nonfinite.tolist() == [1.0] * len(tensors) + [0.0]

    def test_grad_stats_keeps_the_flag_over_dtype_groups(self) -> None:
        """A clean group after a bad one must not clear the flag; order and place must not matter."""
        dtypes = self.dtypes() * 2
        for bad in range(len(dtypes)):
            tensors = [torch.ones(5, dtype=d) for d in dtypes]
            tensors[bad][3] = math.nan
            found = self._measure(tensors)
            assert float(found.found_inf) == 1.0, f"lost the NaN in tensor {bad} ({dtypes[bad]})"
            assert found.nonfinite.tolist() == [float(i == bad) for i in range(len(dtypes))]

    def test_grad_stats_of_mixed_lists_keeps_their_order(self) -> None:
        """`norms[i]` belongs to `grads[i]`, whatever the grouping inside."""
        tensors = [torch.full((i + 1,), float(i + 1), dtype=d) for i, d in enumerate(self.dtypes() * 3)]
        tensors.insert(3, torch.empty(0))
        self._assert_finite(self._assert_norms(tensors))

    def test_grad_stats_finds_one_bad_element_among_millions(self) -> None:
        """In the first, an inner and the last place."""
        tensor = torch.ones(self.large_numel, device=self.device)
        for position in (0, self.large_numel // 2 + 1, self.large_numel - 1):
            tensor[position] = math.inf
            assert float(self.kernels.grad_stats([tensor]).found_inf) == 1.0, f"at {position}"
            tensor[position] = 1.0
        found = self.kernels.grad_stats([tensor])
        self._assert_finite(found)
        assert float(found.norm) == pytest.approx(math.sqrt(self.large_numel), rel=self.norm_rtol, abs=0.0)

    def test_grad_stats_finds_a_bad_tensor_among_thousands(self) -> None:
        """Lists are cut into chunks too."""
        tensors = [torch.ones(3, device=self.device) for _ in range(data.MANY)]
        for bad in (0, 749, 1499):
            tensors[bad] = torch.tensor([1.0, math.nan, 1.0]).to(self.device)
            found = self.kernels.grad_stats(tensors)
            assert float(found.found_inf) == 1.0, f"tensor {bad} of 1500"
            assert found.nonfinite.nonzero().flatten().tolist() == [bad]
            tensors[bad] = torch.ones(3, device=self.device)

    def test_grad_stats_does_not_flag_finite_elements_whose_square_overflows(self) -> None:
        """|g| = 1e20 is finite, and so is its norm."""
        big = [torch.tensor([1e20, -1e20, 3.0]), torch.tensor([1e25]), torch.tensor([3e38])]
        for tensors in ([big[0]], [big[1]], [big[2]], big, [torch.ones(3), big[0]]):
            self._assert_finite(self._assert_norms(tensors))
        for order in (1.0, 3.0, math.inf):
            self._assert_finite(self._assert_norms(big[:2], order))

    def test_grad_stats_does_not_flag_a_norm_that_overflows(self) -> None:
        """The norm may pass float32; the elements are finite all the same."""
        for tensors in ([torch.full((16,), 3e38)], [torch.full((1,), 3e38)] * 16):
            self._assert_finite(self._measure(tensors))

    def test_grad_stats_of_small_elements_whose_square_underflows(self) -> None:
        """1e-30 is not nothing; the clipping coefficient depends on it."""
        self._assert_finite(self._assert_norms([torch.full((4,), 1e-30), torch.tensor([2e-25])]))
        self._assert_finite(self._assert_norms([torch.full((4,), 1e-30)]))

    def test_grad_stats_of_subnormals_and_signed_zeros(self) -> None:
        """Neither is an overflow."""
        for dtype in self.dtypes():
            info = torch.finfo(dtype)
            values = torch.tensor([-0.0, 0.0, info.smallest_normal, info.max, info.min], dtype=dtype)
            self._assert_finite(self._measure([values, torch.full((3,), -0.0, dtype=dtype)]))
        assert float(self._measure([torch.tensor([-0.0])]).norm) == 0.0
        self.requires("keeps_subnormals")
        found = self._measure([torch.full((4,), 1e-40)])
        self._assert_finite(found)
        assert float(found.norm) == pytest.approx(2e-40, rel=1e-3, abs=0.0)

    def test_grad_stats_of_no_tensors(self) -> None:
        """No gradients: norm 0, no flag, and the promised shapes."""
        found = self.kernels.grad_stats([])
        assert (found.norm.shape, found.norms.shape, found.nonfinite.shape) == ((), (0,), (0,))
        assert (float(found.norm), float(found.found_inf)) == (0.0, 0.0)

    def test_grad_stats_of_empty_tensors(self) -> None:
        """A parameter with no elements has norm 0, alone and among others."""
        empty, values = torch.empty(0), torch.tensor([3.0, 4.0])
        for order in (2.0, math.inf):
            found = self._measure([empty], order)
            assert (float(found.norm), float(found.found_inf)) == (0.0, 0.0)
            self._assert_finite(self._assert_norms([empty, values, torch.empty(2, 0)], order))

    def test_grad_stats_of_complex_gradients(self) -> None:
        """The norm is over absolute values; either part may be bad."""
        self.requires("supports_complex")
        values = data.random((33,), torch.complex64)
        found = self._assert_norms([values, torch.ones(2)])
        assert found.norm.dtype is torch.float32
        self._assert_finite(found)
        for bad in (complex(math.inf, 0), complex(0, math.nan), complex(1, -math.inf)):
            tensor = values.clone()
            tensor[32] = torch.tensor(bad)
            assert float(self._measure([tensor]).found_inf) == 1.0, str(bad)

    def test_grad_stats_only_reads(self) -> None:
        """Contents, surroundings and version counters stay, with and without a bad element."""
        for bad in (1.0, math.inf, math.nan):
            values = [torch.full((17,), 2.0, dtype=d) for d in self.dtypes()]
            for value in values:
                value[7] = bad
            made = [data.guarded(v, self.device, step) for v in values for step in (1, 2)]
            tensors = [g.tensor for g in made]
            before = data.versions(*tensors)
            self.kernels.grad_stats(tensors)
            assert all(g.untouched() for g in made), "measure wrote to the gradients"
            assert data.versions(*tensors) == before, "measure moved a version counter"

    def test_grad_stats_results_are_the_callers_own(self) -> None:
        """A result must not change with the next call, nor one part of it with another."""
        own = self._measure([torch.tensor([3.0, 4.0])])
        for part, others in ((own.norm, own.norms), (own.found_inf, own.nonfinite)):
            before = others.clone()
            part.add_(1.0)
            assert torch.equal(others, before), "two parts of a measurement share memory"
        first = self._measure([torch.tensor([3.0, 4.0])])
        second = self._measure([torch.tensor([math.inf])])
        empty, other = self.kernels.grad_stats([]), self.kernels.grad_stats([])
        empty.found_inf.fill_(1.0)
        assert (float(first.norm), float(first.found_inf), first.nonfinite.tolist()) == (5.0, 0.0, [0.0])
        assert float(second.found_inf) == 1.0
        assert (float(empty.norm), float(other.found_inf), float(self.kernels.grad_stats([]).found_inf)) == (
            0,
            0,
            0,
        )

    def test_grad_stats_is_outside_of_autograd(self) -> None:
        """Gradients of ``create_graph=True`` carry a graph; the measurement must not."""
        leaf = torch.ones(3, device=self.device, requires_grad=True)
        found = self.kernels.grad_stats([leaf * 2])
        assert not any(t.requires_grad for t in vars(found).values())

    def test_grad_stats_is_the_same_every_time(self) -> None:
        """Bit for bit on the same input."""
        tensors = [data.random((n,), d, n).to(self.device) for n in (1, 1000, 70_001) for d in self.dtypes()]
        first, second = self.kernels.grad_stats(tensors), self.kernels.grad_stats(tensors)
        assert all(
            data.same_bits(a, b) for a, b in zip(vars(first).values(), vars(second).values(), strict=True)
        )

    def test_grad_stats_does_not_wait_for_the_device(self) -> None:
        """The host must not read a value, whether something is bad or not."""
        for value in (1.0, math.inf):
            tensors = [torch.full((5,), value, dtype=d).to(self.device) for d in self.dtypes()]
            self.kernels.grad_stats(tensors)
            for order in (2.0, math.inf):
                with data.waits(self.device) as seen:
                    self.kernels.grad_stats(tensors, order)
                assert seen == []

    def test_grad_stats_agrees_with_the_portable_kernel(self) -> None:
        """Within `norm_rtol` for the norms; exactly for the flags."""
        tensors = [data.random((n,), d, n).to(self.device) for n in data.LENGTHS for d in self.dtypes()]
        tensors[5][0] = math.nan
        mine, theirs = self.kernels.grad_stats(tensors), PORTABLE.grad_stats(tensors)
        assert torch.equal(mine.nonfinite.cpu(), theirs.nonfinite.cpu())
        assert float(mine.found_inf) == float(theirs.found_inf)
        assert mine.norms.cpu().tolist() == pytest.approx(
            theirs.norms.cpu().tolist(), rel=self.norm_rtol, abs=0.0, nan_ok=True
        )
