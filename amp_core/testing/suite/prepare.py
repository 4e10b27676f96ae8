"""What `Kernels.layout` and `Kernels.prepare` must do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from amp_core.kernels import PORTABLE
from amp_core.testing.fixtures import BackendFixtures
from amp_core.testing.suite import data


class PrepareConformance(BackendFixtures):
    """A prepared list stands for the list: same tensors, same order, their values of the moment."""

    AREA = "prepare"

    def _made(self, seed: int = 0) -> list[Tensor]:
        """Return gradients of every dtype and several layouts, empty ones between them."""
        made = [torch.empty(0, device=self.device)]
        for dtype in self.dtypes():
            made += [data.random((n,), dtype, seed + n).to(self.device) for n in (1, 5, 33)]
            made.append(data.random((4, 6), dtype, seed).to(self.device).t())
            made.append(data.random((4, 6), dtype, seed + 1).to(self.device)[:, ::2])
        return made

    def _prepared(self, tensors: list[Tensor]) -> Iterator[tuple[str, Sequence[Tensor]]]:
        """Both ways to prepare `tensors`; the layout is that of others like them."""
        yield "prepare(tensors)", self.kernels.prepare(tensors)
        layout = self.kernels.layout(self._made(seed=77))
        yield "prepare(tensors, layout of their like)", self.kernels.prepare(tensors, layout)

    def test_prepared_gradients_are_measured_alike(self) -> None:
        """One that is dropped, repeated or out of its place has another's norm."""
        tensors = self._made()
        expected = self.kernels.grad_stats(tensors)
        for how, prepared in self._prepared(tensors):
            found = self.kernels.grad_stats(prepared)
            assert found.norms.cpu().tolist() == expected.norms.cpu().tolist(), how
            assert float(found.norm) == float(expected.norm), how
        tensors[-1].fill_(torch.inf)  # written after it was prepared
        for how, prepared in self._prepared(tensors):
            tensors[2].fill_(torch.nan)
            found = self.kernels.grad_stats(prepared)
            assert [i for i, bad in enumerate(found.nonfinite.cpu().tolist()) if bad] == [
                2,
                len(tensors) - 1,
            ], how

    def test_prepared_gradients_are_scaled_in_place(self) -> None:
        """A copy would be scaled instead."""
        for number in range(2):
            tensors = self._made()
            how, prepared = list(self._prepared(tensors))[number]
            expected = [t.clone() for t in tensors]
            factor, flag = data.scalar(0.5, self.device), data.scalar(0.0, self.device)
            self.kernels.multiply_(expected, factor)
            self.kernels.multiply_(prepared, factor, flag)
            self._assert_same(tensors, expected, how)
            assert float(flag) == 0.0

    def test_prepared_tensors_are_cast(self) -> None:
        """Each in its own place."""
        tensors = self._made()
        for target in self.dtypes():
            expected = PORTABLE.cast(tensors, target)
            for how, prepared in self._prepared(tensors):
                self._assert_same(self.kernels.cast(prepared, target), expected, how)

    def test_prepared_gradients_are_added(self) -> None:
        """Each to its own total."""
        grads = self._made(seed=5)
        for how, prepared in self._prepared(grads):
            totals, expected = self._made(), self._made()
            self.kernels.add_(expected, grads)
            self.kernels.add_(totals, prepared)
            self._assert_same(totals, expected, how)

    def test_prepare_only_reads(self) -> None:
        """Neither values nor version counters change."""
        tensors = self._made()
        before, versions = [t.clone() for t in tensors], data.versions(*tensors)
        for _ in self._prepared(tensors):
            self._assert_same(tensors, before, "prepare wrote")
            assert data.versions(*tensors) == versions

    def test_layout_keeps_no_tensor_alive(self) -> None:
        """It outlives the gradients of a step: memory would never be given back."""
        tensors = self._made()
        alive = [weakref.ref(t) for t in tensors]
        layout = self.kernels.layout(tensors)
        del tensors
        gc.collect()
        assert not any(ref() is not None for ref in alive), f"{layout!r:.80} refers to tensors"

    def test_layouts_of_other_strides_are_kept_apart(self) -> None:
        """The gradients of the next step may have the same shapes, but lie otherwise."""
        for dtype in self.dtypes():
            lying = [
                data.random((6, 4), dtype).to(self.device),
                data.random((4, 6), dtype).to(self.device).t(),
                data.random((6, 8), dtype).to(self.device)[:, ::2],
            ]
            layouts = [self.kernels.layout([tensor]) for tensor in lying]
            for tensor, layout in zip(lying, layouts, strict=True):
                found = self.kernels.grad_stats(self.kernels.prepare([tensor], layout))
                assert float(found.norm) == float(self.kernels.grad_stats([tensor]).norm), tensor.stride()

    def test_prepare_of_no_tensors(self) -> None:
        """A model without gradients."""
        for prepared in (self.kernels.prepare([]), self.kernels.prepare([], self.kernels.layout([]))):
            assert float(self.kernels.grad_stats(prepared).norm) == 0.0

    @staticmethod
    def _assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
        assert len(found) == len(expected), f"{what}: {len(found)} tensors, not {len(expected)}"
        wrong = [
            i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not data.same_values(a, b)
        ]
        assert not wrong, f"{what}: tensors {wrong} differ"
