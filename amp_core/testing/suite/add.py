"""What `Kernels.add_` must do with every kind of number and list."""

from __future__ import annotations

import math

import torch

from amp_core.testing.suite.judge import Judge


class AddConformance(Judge):
    """Sums in place, in the dtype of the totals, which accumulate gradients over micro-batches."""

    AREA = "add"

    def test_add_keeps_what_is_not_finite(self) -> None:
        """An overflow in one micro-batch must still be there after the last; zeros are no exception."""
        for total, grad in self._summed_dtypes():
            small = [torch.finfo(dtype).smallest_normal for dtype in (total, grad)]
            bad = math.inf, math.nan
            values = torch.tensor([0.0, bad[0], -bad[0], *bad, 1.0, -0.0, 0.0, 1.0, small[0]], dtype=total)
            others = torch.tensor(
                [2.0, 1.0, 1.0, -bad[0], 1.0, bad[0], -0.0, -0.0, bad[1], small[1]], dtype=grad
            )
            for places in (slice(None), *range(len(values))):
                self._judge_add([values[places].to(self.device)], [others[places].to(self.device)])
            if self.keeps_subnormals:
                tiny = torch.full((3,), small[0] / 4, dtype=total)
                self._judge_add([tiny.to(self.device)], [torch.zeros(3, dtype=grad).to(self.device)])
                zeros, tiny = torch.zeros(3, dtype=total), torch.full((3,), small[1] / 4, dtype=grad)
                self._judge_add([zeros.to(self.device)], [tiny.to(self.device)])

    def test_add_refuses_other_shapes_before_it_writes(self) -> None:
        """A gradient that is left out, or broadcast, must not pass silently."""
        for dtype in self.dtypes()[:2]:
            for shapes in ([(3,)], [(3,), (5,)], [(3,), (1,)], [(3,), ()], [(3,), (4,), (4,)]):
                totals = [torch.ones(n, device=self.device) for n in (3, 4)]
                grads = [torch.ones(shape, dtype=dtype, device=self.device) for shape in shapes]
                with self._refused(
                    f"add_ of gradients of {shapes} to totals of [(3,), (4,)]", [*totals, *grads]
                ):
                    self.kernels.add_(totals, grads)
            self._judge_add(totals, [t.clone() for t in totals], "after a call that was refused:")
