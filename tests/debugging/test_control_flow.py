"""The tools where torch runs functions that it is given: `torch.cond`, `scan`, `while_loop`, `map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.out_dtype import out_dtype
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

import amp_core
from amp_core import autocast

X = torch.randn(3, 3, 8, generator=torch.Generator().manual_seed(1))
Net = Callable[[Tensor], Tensor]


def branch(net: Net, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > -1e9, lambda t: net(t).float(), torch.cos, (x,))  # type: ignore[no-any-return]


def nested(net: Net, x: Tensor) -> Tensor:
    return torch.cond(x.sum() < 1e9, lambda t: branch(net, t), torch.cos, (x,))  # type: ignore[no-any-return]


def scanned(net: Net, x: Tensor) -> Tensor:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        carry = net(carry).float() + row
        return carry, carry.clone()

    return scan(step, torch.zeros(3, 8), x)[1]  # type: ignore[no-any-return]


def looped(net: Net, x: Tensor) -> Tensor:
    def step(i: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, net(t).float()

    run: Any = while_loop
    return run(lambda i, _: i < 3, step, (torch.tensor(0), x))[1]  # type: ignore[no-any-return]


def mapped(net: Net, x: Tensor) -> Tensor:
    run: Any = map_rows
    return run(lambda row: net(row).tanh(), x)  # type: ignore[no-any-return]


PROGRAMS = [(branch, 1), (nested, 1), (scanned, 3), (looped, 3), (mapped, 3)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("program", "calls"), PROGRAMS)
@torch.no_grad()
def test_a_recording_sees_the_ops_of_bodies(
    program: Callable[[Net, Tensor], Tensor], calls: int, compiled: bool
) -> None:
    """The products of a branch or a loop would be missing in the report, without a word."""
    net = nn.Linear(8, 8)

    def run(x: Tensor) -> Tensor:
        return program(net, x)

    called = torch.compile(run, backend="eager") if compiled else run
    with autocast("cpu", dtype=torch.bfloat16):
        expected = run(X)
        with amp_core.record(net) as recording:
            found = called(X)
    assert torch.equal(found, expected)
    linear = {key: count for key, count in recording.ops.items() if "linear" in key.op}
    ((key, count),) = linear.items()
    assert key.rule == "lower_precision_fp"
    assert count in (calls, calls + 1)  # scan of torch 2.11 runs its body once more, for the shapes


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > -1e9, lambda t: t.abs().neg().log(), torch.cos, (x,))  # type: ignore[no-any-return]


def test_the_guard_names_an_op_of_a_branch() -> None:
    """The error would say that no op made the NaN."""
    net = Logarithm()
    with amp_core.guard(net, steps=lambda _: True), pytest.raises(amp_core.NonFiniteError, match=r"^log in"):
        net(X)


@pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True:UserWarning")  # torch 2.12
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_what_a_recording_sees_of_flex_attention() -> None:
    """Inside a body that torch batches, the ops would run under a mode that they were not given."""
    q = torch.randn(1, 2, 8, 16)
    with autocast("cpu", dtype=torch.bfloat16):
        expected = flex_attention(q, q, q, score_mod=lambda score, *_: score * 2)
        with amp_core.record() as recording:
            found = flex_attention(q, q, q, score_mod=lambda score, *_: score * 2)
    assert torch.equal(found, expected)
    assert [key.op for key in recording.ops] == ["aten::mul.Tensor"]


def test_an_op_that_is_an_argument_stays_one() -> None:
    """As a function that observes its ops, it is refused by those that take ops."""
    x, run = torch.ones(4, 4, dtype=torch.int8), cast("Any", out_dtype)
    with amp_core.record():
        assert run(torch.ops.aten.mm.default, torch.int32, x, x).dtype is torch.int32
