"""Lists of every length, and tensors of many elements, judged by comparing a few large buffers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_core.kernels import GradStats
from amp_core.testing.suite import data
from amp_core.testing.suite import tensors as space
from amp_core.testing.suite.judge import Judge
from amp_core.testing.suite.manners import References

_BLOCKS = (128, 256, 512, 1024, 2048, 4096)
_LONG = 1100
"""More tensors than a chunk of 1024; mixed lists are made in Python, one tensor after the other."""
_SPECIAL = (-0.0, 1e-40, math.inf, -math.inf, math.nan)


class ListJudge(Judge):
    """Where a kernel cuts lists and tensors: by number, by dtype, at empty tensors, in whole blocks."""

    def _judge_short_lists(self) -> None:
        """Lists of a few tensors: with an empty one first, of parameters alone, of whole blocks alone."""
        for length in (2, 3, 4):
            dtypes = itertools.islice(itertools.cycle(self.dtypes()), length)
            shapes = ((0,), (5,), (), (2, 3))
            specs = [space.Spec(s, "contiguous", d, length) for s, d in zip(shapes, dtypes, strict=False)]
            self._judge_specs(specs)
        parameters = [space.Spec((n,), "parameter", torch.float32, n) for n in (5, 3, 4)]
        self._judge_specs(parameters)
        blocks = [space.Spec((n,), "contiguous", torch.float32, n) for n in _BLOCKS]
        self._judge_specs(blocks)

    def _judge_long_lists(self) -> None:
        """Lists that are cut into chunks: of float32 alone, and of all dtypes in turn."""
        few = min(self.many_tensors, _LONG)
        for dtypes, many in (([torch.float32], self.many_tensors), (self.dtypes(), few)):
            for target in (self.backend.supported_dtypes()[0], dtypes[0]):
                self._judge_casts_and_sums(self._buffers(dtypes, many, _SPECIAL), target)
        for dtypes, many in (([torch.float32], self.many_tensors), (self._gradient_dtypes(), few)):
            special = _SPECIAL if dtypes == [torch.float32] else ()  # those of complex numbers have no rule
            self._judge_products(self._buffers(dtypes, many, special))
            self._judge_gradients(self._buffers(dtypes, many))

    def _buffers(
        self, dtypes: Sequence[torch.dtype], many: int, special: Sequence[float] = ()
    ) -> list[Tensor]:
        """Return a buffer for each dtype, with special numbers among others: a few comparisons judge all."""
        buffers = [data.random((2 * (many // len(dtypes)),), d, i) for i, d in enumerate(dtypes)]
        for buffer, (i, number) in itertools.product(buffers, enumerate(special)):
            buffer[i :: 7 + 2 * i] = number
        return [buffer.to(self.device) for buffer in buffers]

    def _cast_apart(self, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return casts with elements; they share no memory with `tensors`, which lie in few storages."""
        memory = space.Memory(tensors)
        casts = [cast for cast in self.kernels.cast(tensors, dtype) if cast.numel()]
        self._assert_own(casts, torch.is_inference_mode_enabled(), tensors[0].device)
        if not memory.is_apart_from(casts):
            self._assert_apart(casts, torch.is_inference_mode_enabled())
        memory.check()
        return casts

    def _judge_casts_and_sums(self, values: list[Tensor], target: torch.dtype) -> None:
        into = [torch.zeros_like(v, dtype=target) for v in values]
        copies = list(map(torch.zeros_like, values))
        sums = [v.clone() for v in values]
        wide, wider = (
            [v.to(torch.promote_types(v.dtype, torch.float32), copy=True) for v in values] for _ in range(2)
        )
        given, *lists = map(_in_turn, (values, into, copies, sums, wide, wider))
        references = References([*given, *itertools.chain(*lists)])
        versions = space.versions(*values)
        casts = self._cast_apart(given, target)
        for targets in lists[:2]:
            self.kernels.cast(given, target, targets)
        for totals in lists[2:4]:
            self.kernels.add_(totals, given)
        self.kernels.add_(lists[4], lists[0])
        references.assert_as_before([], 0)
        assert space.versions(*values) == versions, "a version counter of what is only read has moved"
        for i, value in enumerate(values):
            expected, what = data.plain(value), f"of {len(casts)} tensors, {value.dtype}"
            rounded = data.rounded_once(expected, target)
            self._assert_values(torch.cat(casts[i :: len(values)]), rounded, f"cast {what}")
            self._assert_values(into[i], rounded, f"cast(out=) {what}")
            self._assert_values(copies[i], expected, f"cast(out=) to their own dtype {what}")
            self._assert_values(sums[i], expected * 2, f"add_ {what}")
            expected = expected.to(wide[i].dtype)
            self._assert_values(wide[i], expected * 2, f"add_ to wider ones {what}")
            sum_of_both = expected + data.plain(into[i])  # what was written, if the device flushes
            self._assert_values(wider[i], sum_of_both, f"add_ of {target} to wider ones {what}")

    def _judge_products(self, values: list[Tensor]) -> None:
        products = [v.clone() for v in values]
        tensors = _in_turn(products)
        references = References(tensors)
        self.kernels.multiply_(tensors, data.scalar(0.5, self.device))
        references.assert_as_before([], 0)
        for value, product in zip(values, products, strict=True):
            what = f"multiply_ of {len(tensors)} tensors, {value.dtype}"
            self._assert_products(product, data.plain(value) * 0.5, what)

    def _judge_gradients(self, values: list[Tensor]) -> None:
        """Norms and flags, with a bad element in every part of the list."""
        values[-1][-1] = 9.0  # the largest one
        moduli, tensors = [data.plain(v).abs().double() for v in values], _in_turn(values)
        references, versions = References(tensors), space.versions(*values)
        many, what = len(tensors), f"of {len(tensors)} tensors"
        orders = (2.0, 3.0, torch.inf, 1.0)
        for order in orders:
            columns = [torch.linalg.vector_norm(m.view(-1, 2), order, dim=1) for m in moduli]
            norms = torch.stack(columns, 1).flatten()
            norms = torch.cat([norms[:-3], norms.new_zeros(1), norms[-3:]])
            self._assert_norms(self.kernels.grad_stats(tensors, order), norms, order, what)
        references.assert_as_before([], 0)
        assert space.versions(*values) == versions, "a version counter of what is only read has moved"
        half, flag = data.scalar(0.5, self.device), data.scalar(0.0, self.device)
        places = [place for place in (many // 2, many - 1, many - 2, 0, 749, 1499) if place < many]
        for order, place in zip(itertools.cycle(orders), places, strict=False):
            tensors[place][-1] = torch.nan
            stats = self.kernels.grad_stats(tensors, order)
            assert float(stats.found_inf) == 1.0, f"a NaN in tensor {place} {what}"
            flagged = stats.nonfinite.cpu().nonzero().flatten().tolist()
            assert flagged == [place], f"nonfinite flags {flagged[:5]}, not [{place}], {what}"
            self.kernels.multiply_(tensors, half, flag.zero_())
            assert float(flag) == 1.0, f"a NaN in tensor {place} {what}"
            tensors[place].zero_()

    def _assert_norms(self, stats: GradStats, norms: Tensor, order: float, what: str) -> None:
        """Compare with the norms of the tensors, none of which has inf or NaN."""
        here = torch.empty(0, device=self.device).device
        self._assert_own(list(data.statistics(stats)), torch.is_inference_mode_enabled(), here)
        self._assert_norms_close(stats.norms, norms.tolist(), f"norms of order {order} {what}")
        whole = [float(torch.linalg.vector_norm(norms, order))]
        self._assert_norms_close(stats.norm.reshape(1), whole, f"norm of order {order} {what}")
        assert not stats.nonfinite.any(), f"flags of order {order} {what}"
        assert float(stats.found_inf) == 0.0, f"the flag of order {order} {what}"

    def _judge_last_of_many_elements(self) -> None:
        """Zeros but for the last element, in each dtype: a kernel may cut them otherwise than float32."""
        for dtype in self.dtypes():
            numel = self.large_numel if dtype is torch.float32 else self.large_numel // 16
            tensor = torch.zeros(numel, dtype=dtype, device=self.device)
            tensor[-1] = 4.0
            for order in (1.0, torch.inf):
                norm = self.kernels.grad_stats([tensor], order).norm.reshape(1)
                self._assert_norms_close(norm, [4.0], f"norm of order {order} of {numel} elements of {dtype}")
            if dtype is torch.float32:  # the other kernels have been judged on it
                continue
            self.kernels.multiply_([tensor], data.scalar(0.5, self.device))
            self.kernels.add_([tensor], [tensor.clone()])
            low = self.kernels.cast([tensor], self.backend.supported_dtypes()[0])[0]
            for name, result in (("multiply_ and add_", tensor), ("cast", low)):
                last, step = float(result[-1]), self.product_ulps * torch.finfo(result.dtype).eps
                near = math.isclose(last, 4.0, rel_tol=step)
                assert near, f"{name} of {numel} elements of {dtype} end with {last}"

    def _judge_targets_that_are_the_sources(self) -> None:
        """What is written may be what is read, as one object or as two."""
        for dtype, alias in itertools.product(self.dtypes(), (lambda t: t, lambda t: t.detach())):
            values = data.random((17,), dtype)
            tensor = values.to(self.device, copy=True)
            self.kernels.cast([tensor], dtype, [alias(tensor)])
            self._assert_values(tensor, values, f"cast of {dtype} into itself")
            self.kernels.add_([tensor], [alias(tensor)])
            self._assert_values(tensor, values * 2, f"add_ of {dtype} to itself")


def _in_turn(buffers: Sequence[Tensor]) -> list[Tensor]:
    """Return two elements of each buffer in turn, and an empty tensor near the end."""
    columns = [torch.split(buffer, 2) for buffer in buffers]
    tensors = list(itertools.chain.from_iterable(zip(*columns, strict=True)))
    tensors[-3:-3] = [buffers[0][:0]]
    return tensors
