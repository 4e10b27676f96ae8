"""What kernels keep from call to call: no tensor, no result, no more memory each time."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from amp_core.kernels import GradStats
from amp_core.testing.suite import data
from amp_core.testing.suite import tensors as space
from amp_core.testing.suite.judge import Judge

_CALLS = 50


class MemoryConformance(Judge):
    """Kernels keep no tensor and no result, and each call reads the current values."""

    AREA = "memory"

    def _gradients(self, seed: int = 0) -> list[Tensor]:
        return [spec._replace(seed=seed + i).build(self.device) for i, spec in enumerate(self._specs())]

    def _specs(self) -> list[space.Spec]:
        return space.specs(self.dtypes(), ("contiguous", "reversed"), [(17,), (6, 10), (0,)])

    def test_kernels_read_the_values_of_the_moment(self) -> None:
        """A result kept for a tensor, a list or a prepared list is stale once the tensor is written."""
        tensors, others = self._gradients(), self._gradients(seed=50)
        layout = self.kernels.layout(others)
        forms = [tensors, self.kernels.prepare(tensors), self.kernels.prepare(tensors, layout)]
        orders = [2.0, torch.inf]
        for change in ("nothing", "copy_", "data", "multiply_"):
            orders.reverse()  # so that the last one kept is the first one asked for again
            for tensor, other in zip(tensors, others, strict=True):
                # A write through `data` moves no version counter, as optimizers and DDP do.
                target = {"copy_": tensor, "data": tensor.data}.get(change)
                if target is not None:
                    target.copy_(other + len(change))
            for form in forms:
                what = f"after {change}:"
                if change == "multiply_":
                    self._judge_multiply(tensors, 0.5, float(form is tensors), what=what, given=form)
                low = self.backend.default_dtype()
                self._judge_cast(tensors, low, None, what, form)
                self._judge_cast(tensors, low, [t.clone() for t in others], what, form)
                for order in orders:
                    self._judge_stats(tensors, order, what, form)
                self._judge_add([o.clone() for o in others], tensors, what, form)
            # Another list of as many tensors, whose dtypes and shapes stand in other places.
            self._judge_cast(tensors[::-1], self.backend.default_dtype())
            self._judge_stats(tensors[::-1])
            if change == "multiply_":
                self._judge_multiply(tensors[::-1])

    def test_multiply_reads_the_factor_of_the_moment(self) -> None:
        """The scaler writes the factor of each step into the same tensor."""
        grad, factor = torch.ones(3, device=self.device), data.scalar(0.5, self.device)
        for value in (0.5, 4.0, 0.25):
            factor.data.fill_(value)
            self.kernels.multiply_([grad.fill_(1.0)], factor)
            self._assert_products(grad, torch.full((3,), value), f"times {value}")
        flag = data.scalar(0.0, self.device)
        for value in (torch.inf, 1.0):
            flag.data.zero_()
            self.kernels.multiply_([grad.fill_(value)], factor, flag)
            assert float(flag) == (0.0 if value == 1.0 else 1.0), f"found_inf of {value}"

    def test_kernels_keep_nothing_alive(self) -> None:
        """The caller owns arguments, results and layouts: dropping them frees their memory."""
        every = space.rotated(self.dtypes(), self._layouts())
        for name in self._kernel_calls([]):
            specs = self._specs() if name.startswith("quantize") else every
            tensors = [spec.build(self.device) for spec in specs]
            result = self._kernel_calls(tensors)[name]()
            results = list(data.statistics(result)) if isinstance(result, GradStats) else result
            made = results if isinstance(results, list) else ()  # what `layout` returns may be any list
            tracked = [*tensors, *(each for each in made if isinstance(each, Tensor))]
            objects = [weakref.ref(t) for t in tracked]
            memory = [StorageWeakRef(t.untyped_storage()) for t in tracked if t.numel()]  # type: ignore[no-untyped-call]
            kept = result if name == "layout" else None
            del tensors, result, results, made, tracked
            gc.collect(0)
            alive = (
                sum(ref() is not None for ref in objects),
                sum(not m.expired() for m in memory),  # type: ignore[no-untyped-call]
            )
            assert alive == (0, 0), (
                f"{name} keeps {alive[0]} tensors and {alive[1]} storages alive ({kept!r:.60})"
            )

    def test_kernels_need_no_more_memory_with_every_call(self) -> None:
        """Whatever a call leaves behind fills the memory during a long training run."""
        names = [*self._kernel_calls([])]
        runs = 3 + 2 * len(names)
        # At other addresses each time, as gradients are: what is kept by address must not grow either.
        grads = iter(torch.split(torch.ones(runs * _CALLS * 20, device=self.device), 5))
        gc.collect()
        gc.freeze()  # freeing older garbage in the meantime would hide growth
        try:
            # What a device in Python needs for its tensors; the first time also warms up.
            unavoidable = max(0, min(self._growth(grads), self._growth(grads)))
            grown = {"together": self._growth(grads, *names) - unavoidable}
            for _ in range(2):  # whatever else the process allocates is rarely there each time
                if max(grown.values()) >= 25:
                    grown = {name: self._growth(grads, name) - unavoidable for name in names}
        finally:
            gc.unfreeze()
        grown = {name: blocks for name, blocks in grown.items() if blocks >= 25}
        assert not grown, f"blocks of Python's memory that {_CALLS} calls leave in use: {grown}"

    def _growth(self, grads: Iterator[Tensor], *names: str) -> int:
        """Return the number of memory blocks that the calls add: the median, as other changes happen once."""
        blocks = []
        for _ in range(4):
            for grad in itertools.islice(grads, _CALLS):
                calls = self._kernel_calls([grad])
                for name in names:
                    calls[name]()
                calls.clear()
            gc.collect()  # of all generations, which also empties Python's free lists
            blocks.append(sys.getallocatedblocks())
        return sorted(after - before for before, after in pairwise(blocks))[1]

    def test_layout_is_of_the_tensors_strides(self) -> None:
        """The gradients of the next step may have the same shapes, but lie otherwise."""
        for dtype in self.dtypes():
            specs = [
                space.Spec((6, 4), layout, dtype)
                for layout in ("contiguous", "reversed", "gaps", "padded rows")
            ]
            layouts = [self.kernels.layout([spec.build(self.device)]) for spec in specs]
            for spec, layout in zip(specs, layouts, strict=True):
                tensor = spec.build(self.device)
                self._judge_stats([tensor], 2.0, spec.layout, self.kernels.prepare([tensor], layout))
            self._judge_layout_of_a_bucket(dtype)

    def _judge_layout_of_a_bucket(self, dtype: torch.dtype) -> None:
        """Gradients that fill one storage, as those of a bucket do, may lie apart in the next step."""
        values = data.random((sum(space.LENGTHS),), dtype).to(self.device)
        together = list(torch.split(values, list(space.LENGTHS)))
        apart = [part.clone() for part in reversed(together)][::-1]
        for like, tensors, what in ((together, apart, "apart"), (apart, together, "in one storage")):
            layout, where = self.kernels.layout(like), f"{what}, with the layout of others:"
            self._judge_stats(tensors, 2.0, where, self.kernels.prepare(tensors, layout))
            self._judge_multiply(tensors, what=where, given=self.kernels.prepare(tensors, layout))
