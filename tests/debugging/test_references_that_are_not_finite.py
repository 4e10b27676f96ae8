"""Steps whose loss or gradients have inf or NaN in float32, too: `compare` and `advise` say so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import amp_core
from amp_core.debugging.capture import OP


class Root(nn.Module):
    """Its result is finite, and its gradient at 0 is not."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * 0).square().sum().sqrt()  # sqrt


class Masked(nn.Module):
    """A row that a mask hides as a whole has no softmax."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.masked_fill(torch.ones_like(x, dtype=torch.bool), float("-inf"))
        return x + torch.softmax(hidden, -1)  # softmax


class Large(nn.Module):
    """Exceeds the range of float32."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * 1e30).exp()  # exp


FAULTS = {Root: ("aten::div", "# sqrt"), Masked: ("softmax", "# softmax"), Large: ("aten::exp", "# exp")}


def _steps(kind: type[nn.Module]) -> list[Callable[[], Tensor | None]]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 2)), torch.randn(3, 4)

    def loss() -> Tensor:
        result: Tensor = model(x).float().square().mean()
        return result

    def whole() -> None:
        loss().backward()  # type: ignore[no-untyped-call]

    return [loss, whole]


@pytest.mark.parametrize("kind", FAULTS)
def test_the_op_that_is_not_finite_in_float32_is_named(kind: type[nn.Module]) -> None:
    """NaN against NaN counts as an error of 0, within the tolerance, and a loss scale is recommended."""
    op, comment = FAULTS[kind]
    for step in _steps(kind):
        for tool in (amp_core.compare, amp_core.advise):
            report = tool(step, "cpu", dtype=torch.float16)
            comparison = report if isinstance(report, amp_core.Comparison) else report.before
            assert isinstance(comparison, amp_core.Comparison)
            assert not comparison.reference_is_finite
            fault = comparison._reference_fault
            assert fault is not None
            assert fault.key.place.module == "1"
            assert op in fault.key.name
            file, _, number = fault.line.rpartition(":")
            with open(file, encoding="utf-8") as lines:
                assert comment in lines.readlines()[int(number) - 1]
            text = " ".join(str(report).split())
            assert "of the float32 run has inf or NaN itself, first in" in text
            assert "within the tolerance" not in text
            assert max(map(len, str(report).splitlines())) <= 80
            if isinstance(report, amp_core.Advice):
                assert report.init_scale is None
                assert "not sought" in text
            elif comparison.reference_loss is not None and kind is not Root:
                assert "no relative error" in text


def test_a_mask_is_no_fault_of_the_reference() -> None:
    """Infinite values that a softmax turns into zeros are taken for a fault."""
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()[:3]

    def step() -> Tensor:
        result: Tensor = torch.softmax(model(x).masked_fill(~mask, float("-inf")), -1).square().sum()
        return result

    comparison = amp_core.compare(step, "cpu")
    assert comparison.reference_is_finite
    assert "inf or NaN itself" not in str(comparison)
    assert any(row.key.level == OP for row in comparison.differences)
