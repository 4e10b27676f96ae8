"""Compare what a kernel wrote with the reference, as exactly as the device computes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from amp_core.testing.suite import data
from amp_core.testing.suite.manners import Manners
from amp_core.testing.suite.tensors import host


class Comparisons(Manners):
    """Comparisons that allow for what the fixtures say of the device's arithmetic."""

    def _computable(self, values: Tensor) -> Tensor:
        """Leave out subnormals where the device flushes them."""
        if self.keeps_subnormals:
            return values
        wide = values.double().abs()
        return values[(wide == 0) | ~(wide < torch.finfo(values.dtype).tiny)]

    def _assert_values(self, result: Tensor, expected: Tensor, what: str) -> None:
        wrong = self._departure(result, expected)
        assert not wrong, f"{what}: {wrong}"

    def _departure(self, result: Tensor, expected: Tensor) -> str:
        """Say how `result` differs from what is expected; empty if it does not."""
        found, wanted = self._flushed(data.plain(result), expected)
        return "" if data.same_values(found, wanted) else difference(found, wanted)

    def _assert_products(self, result: Tensor, expected: Tensor, what: str) -> None:
        if not self.product_ulps or result.is_complex():
            self._assert_values(result, expected, what)
            return
        step = torch.finfo(result.dtype).eps * self.product_ulps
        found, wanted = self._flushed(host(result), expected)
        close = torch.isclose(found, wanted, rtol=step, atol=0.0, equal_nan=True)
        assert bool(close.all()), f"{what}: {difference(found, wanted, ~close)}"

    def _assert_norms_close(self, norms: Tensor, expected: list[float], what: str) -> None:
        wanted = torch.tensor(expected, dtype=torch.float64).to(norms.dtype)
        smallest = 1e-44 if self.keeps_subnormals else torch.finfo(norms.dtype).tiny
        found = norms.detach().cpu()
        far = [
            not math.isclose(a, b, rel_tol=self.norm_rtol, abs_tol=smallest)
            and not (math.isnan(a) and math.isnan(b))
            for a, b in zip(found.tolist(), wanted.tolist(), strict=True)
        ]
        assert not any(far), f"{what}: {difference(found, wanted, torch.tensor(far))}"

    def _flushed(self, found: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
        """On a device that flushes, a subnormal result may also be zero; nothing else may."""
        if self.keeps_subnormals or found.shape != expected.shape or found.dtype is not expected.dtype:
            return found, expected
        parts = [torch.view_as_real(t) if t.is_complex() else t for t in (found, expected)]
        tiny = torch.finfo(expected.dtype).tiny
        zero = (parts[0] == 0) & (parts[1].to(torch.float64).abs() < tiny)
        return torch.where(zero, 0.0, parts[0]), torch.where(zero, 0.0, parts[1])


def difference(found: Tensor, expected: Tensor, where: Tensor | None = None) -> str:
    """Say how two tensors differ: in kind, or in their first elements that do."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"{found.dtype} of shape {tuple(found.shape)}, not {expected.dtype} of {tuple(expected.shape)}"
    if where is None:
        where = data.differing(found, expected)  # not by value: zeros differ by sign
    at = [int(i) for i in where.reshape(-1).nonzero()[:3]]
    flat, wanted = found.reshape(-1), expected.reshape(-1)
    texts = [f"{flat[i].item()!r} instead of {wanted[i].item()!r} at {i}" for i in at]
    return f"{', '.join(texts)} (of {int(where.sum())} wrong elements)"
