"""What `Kernels.add_` must do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from amp_core.testing.fixtures import BackendFixtures
from amp_core.testing.suite import data


def rounded_sum(total: Tensor, grad: Tensor) -> Tensor:
    """Return the sum on the CPU, rounded once to the dtype of `total`.

    Twice the digits and two more make the first of two roundings harmless (Figueroa, "When is double
    rounding innocuous?", 1995): float32 is enough for 16 bits, float64 for float32.
    """
    wide = torch.float32 if total.dtype.itemsize == 2 and grad.dtype.itemsize == 2 else torch.float64
    return (total.cpu().to(wide) + grad.cpu().to(wide)).to(total.dtype)


class AddConformance(BackendFixtures):
    """Sums in place, in the dtype of the totals: what accumulates gradients over micro-batches."""

    AREA = "add"

    def _summed_dtypes(self) -> list[tuple[torch.dtype, torch.dtype]]:
        """Dtypes of totals and of gradients that are no wider."""
        dtypes = self.dtypes()
        return [(a, b) for a in dtypes for b in dtypes if a is b or a.itemsize > b.itemsize]

    def _assert_sums(self, totals: list[Tensor], grads: list[Tensor], what: str = "") -> None:
        expected = [rounded_sum(t, g) for t, g in zip(totals, grads, strict=True)]
        self.kernels.add_(totals, grads)
        for i, (total, sums) in enumerate(zip(totals, expected, strict=True)):
            same = data.same_values(total, sums)
            assert same, (
                f"{what} tensor {i}: {total.dtype}, shape {tuple(total.shape)}: {total} is not {sums}"
            )

    def test_add_rounds_every_sum_once(self) -> None:
        """Every dtype pair, length and place in a list; a sum in the gradient's dtype rounds first."""
        for total, grad in self._summed_dtypes():
            totals = [data.random((n,), total, n).to(self.device) for n in data.LENGTHS]
            grads = [data.random((n,), grad, 1000 + n).to(self.device) for n in data.LENGTHS]
            self._assert_sums(totals, grads, f"{grad} onto {total},")
            self._assert_sums(totals[-1:], grads[-1:], f"{grad} onto {total}, alone,")

    def test_add_of_mixed_lists(self) -> None:
        """Grouping by dtype must not mix up who gets what; empty tensors are none the less in the list."""
        pairs = self._summed_dtypes() * 2
        totals = [data.random((3 + i,), a, i).to(self.device) for i, (a, _) in enumerate(pairs)]
        grads = [data.random((3 + i,), b, 50 + i).to(self.device) for i, (_, b) in enumerate(pairs)]
        for tensors in (totals, grads):
            tensors.insert(1, torch.empty(0, device=self.device))
        self._assert_sums(totals, grads)

    def test_add_of_every_memory_layout(self) -> None:
        """Each element once, whatever the strides, of either side."""
        for total, grad in self._summed_dtypes():
            for strided in (True, False):
                for (name, there), (_, onto) in zip(
                    data.layouts(grad, self.device), data.layouts(total, self.device), strict=True
                ):
                    value = there if strided else there.clone(memory_format=torch.contiguous_format)
                    self._assert_sums([onto], [value], name)

    def test_add_keeps_what_is_not_finite(self) -> None:
        """An overflow in one micro-batch must be found after the last."""
        for total, grad in self._summed_dtypes():
            values = torch.tensor([math.inf, -math.inf, math.inf, math.nan, 1.0, -0.0], dtype=total)
            others = torch.tensor([1.0, 1.0, -math.inf, 1.0, math.inf, -0.0], dtype=grad)
            self._assert_sums([values.to(self.device)], [others.to(self.device)], f"{grad} onto {total},")

    def test_add_of_thousands_of_tensors(self) -> None:
        """Lists are cut into chunks; none may be lost."""
        totals = [torch.full((3,), float(i % 100), device=self.device) for i in range(data.MANY)]
        self.kernels.add_(totals, [torch.ones(3, device=self.device)] * data.MANY)
        wrong = [i for i, t in enumerate(totals) if t.cpu().tolist() != [i % 100 + 1.0] * 3]
        assert not wrong, f"{len(wrong)} of {data.MANY} tensors, the first is number {wrong[0]}"

    def test_add_of_a_large_tensor(self) -> None:
        """The last elements of millions."""
        total = data.random((self.large_numel,), torch.float32).to(self.device)
        self._assert_sums([total], [data.random((self.large_numel,), torch.float32, 1).to(self.device)])

    def test_add_of_no_tensors(self) -> None:
        """Nothing happens, nothing is raised."""
        self.kernels.add_([], [])

    def test_add_writes_the_totals_alone(self) -> None:
        """Gradients are read, versions of what is written move, and neighbours stay."""
        for step in (1, 2):
            for total, grad in self._summed_dtypes():
                onto = [data.guarded(data.random((n,), total), self.device, step) for n in (5, 16, 33)]
                grads = [data.guarded(data.random((n,), grad), self.device, step) for n in (5, 16, 33)]
                read, written = [g.tensor for g in grads], [t.tensor for t in onto]
                before, moved = data.versions(*read), data.versions(*written)
                self.kernels.add_(written, read)
                assert all(g.untouched() for g in grads), f"add_ wrote to {grad} gradients"
                assert all(t.surroundings_untouched() for t in onto), f"add_ wrote around totals of {total}"
                assert data.versions(*read) == before, "add_ moved a version counter of what it reads"
                now = data.versions(*written)
                assert all(a > b for a, b in zip(now, moved, strict=True)), "add_ wrote behind autograd"

    def test_add_is_outside_of_autograd(self) -> None:
        """Totals and gradients may be leaves that require a gradient themselves."""
        total = torch.ones(3, device=self.device, requires_grad=True)
        self.kernels.add_([total], [torch.ones(3, device=self.device, requires_grad=True)])
        assert total.detach().cpu().tolist() == [2.0] * 3
        assert total.grad_fn is None

    def test_add_refuses_lists_of_different_lengths(self) -> None:
        """A gradient that is left out must not pass silently."""
        with pytest.raises((ValueError, RuntimeError)):
            self.kernels.add_([torch.ones(2, device=self.device)], [torch.ones(2, device=self.device)] * 2)

    def test_add_does_not_wait_for_the_device(self) -> None:
        """The host must not read a value."""
        for total, grad in self._summed_dtypes():
            totals, grads = (
                [torch.ones(5, dtype=total, device=self.device)],
                [torch.ones(5, dtype=grad, device=self.device)],
            )
            self.kernels.add_(totals, grads)
            with data.waits(self.device) as seen:
                self.kernels.add_(totals, grads)
            assert seen == []
