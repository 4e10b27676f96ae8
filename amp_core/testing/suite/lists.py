"""Lists of every length, and tensors of many elements, judged by what few whole buffers hold."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from amp_core.testing.suite import data
from amp_core.testing.suite import tensors as space
from amp_core.testing.suite.judge import Judge

_BLOCKS = (128, 256, 512, 1024, 2048, 4096)


class ListJudge(Judge):
    """Where a kernel cuts lists and tensors: by number, by dtype, at empty tensors, in whole blocks."""

    def _judge_short_lists(self) -> None:
        """Lists of a few tensors: with an empty one first, of parameters alone, of whole blocks alone."""
        for length in (2, 3, 4):
            dtypes = itertools.islice(itertools.cycle(self.dtypes()), length)
            shapes = ((0,), (5,), (), (2, 3))
            specs = [space.Spec(s, "contiguous", d, length) for s, d in zip(shapes, dtypes, strict=False)]
            self._judge_every_method(lambda s=specs: [each.build(self.device) for each in s])  # type: ignore[misc]
        parameters = [space.Spec((n,), "parameter", torch.float32, n) for n in (5, 3, 4)]
        self._judge_every_method(lambda: [each.build(self.device) for each in parameters])
        blocks = [space.Spec((n,), "contiguous", torch.float32, n) for n in _BLOCKS]
        self._judge_every_method(lambda: [each.build(self.device) for each in blocks])

    def _judge_long_mixed_lists(self) -> None:
        """Lists that are cut into chunks and mix dtypes; the tensors of each dtype lie in one buffer."""
        dtypes, count = self.dtypes(), min(self.many_tensors, 528) // len(self.dtypes())
        values = [data.random((2 * count,), dtype, i).to(self.device) for i, dtype in enumerate(dtypes)]

        def mixed(buffers: list[Tensor]) -> list[Tensor]:
            columns = [torch.split(buffer, 2) for buffer in buffers]
            tensors = list(itertools.chain.from_iterable(zip(*columns, strict=True)))
            tensors[-3:-3] = [values[0][:0]]
            return tensors

        low = self.backend.supported_dtypes()[0]
        casts = self.kernels.cast(mixed(values), low)
        del casts[-4]
        into, sums, products = ([v.clone() for v in values] for _ in range(3))
        self.kernels.cast(mixed(values), low, mixed(into))
        self.kernels.add_(mixed(sums), mixed(values))
        self.kernels.multiply_(mixed(products), data.scalar(0.5, self.device))
        many = f"of {len(casts)} tensors of several dtypes"
        for i, (dtype, value) in enumerate(zip(dtypes, values, strict=True)):
            expected, what = data.plain(value), f"{many}, {dtype}"
            rounded = data.rounded_once(expected, low)
            self._assert_values(torch.cat(casts[i :: len(dtypes)]), rounded, f"cast {what}")
            self._assert_values(into[i], expected, f"cast(out=) {what}")
            self._assert_values(sums[i], expected * 2, f"add_ {what}")
            wrong = self._product_departure(products[i], expected * 0.5)
            assert not wrong, f"multiply_ {what}: {wrong}"
        norms = torch.cat([data.plain(v).double() for v in values])
        for order in (3.0, torch.inf):
            found = self.kernels.grad_stats(mixed(values), order).norm.reshape(1)
            whole = float(torch.linalg.vector_norm(norms, order))
            self._assert_norms_close(found, [whole], f"norm of order {order} {many}")
        values[-1][-1] = torch.nan
        assert float(self.kernels.grad_stats(mixed(values)).found_inf) == 1.0, f"a NaN at the end {many}"

    def _judge_last_of_many_elements(self) -> None:
        """Zeros but for the last element, in each dtype: a kernel may be cut otherwise than for float32."""
        for dtype in self.dtypes():
            numel = self.large_numel if dtype is torch.float32 else self.large_numel // 16
            tensor = torch.zeros(numel, dtype=dtype, device=self.device)
            tensor[-1] = 4.0
            for order in (1.0, torch.inf):
                norm = float(self.kernels.grad_stats([tensor], order).norm)
                assert norm == 4.0, f"norm of order {order} of {numel} elements of {dtype}: {norm}"
            if dtype is torch.float32:  # the others were judged of it
                continue
            self.kernels.multiply_([tensor], data.scalar(0.5, self.device))
            self.kernels.add_([tensor], [tensor.clone()])
            low = self.kernels.cast([tensor], self.backend.supported_dtypes()[0])[0]
            for name, result in (("multiply_ and add_", tensor), ("cast", low)):
                last = float(result[-1])
                assert last == 4.0, f"{name} of {numel} elements of {dtype} end with {last}"

    def _judge_targets_that_are_the_sources(self) -> None:
        """What is written may be what is read, as one object or as two."""
        for dtype, alias in itertools.product(self.dtypes(), (lambda t: t, lambda t: t.detach())):
            values = data.random((17,), dtype)
            tensor = values.to(self.device, copy=True)
            self.kernels.cast([tensor], dtype, [alias(tensor)])
            self._assert_values(tensor, values, f"cast of {dtype} into itself")
            self.kernels.add_([tensor], [alias(tensor)])
            self._assert_values(tensor, values * 2, f"add_ of {dtype} to itself")
