"""Triton's kernels, interpreted, against the portable ones on lists that hypothesis draws."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st
from interpreted import KERNELS

from amp_core.kernels import PORTABLE, GradStats, ScaleTensors, triton_norms, triton_programs, triton_tables
from amp_core.states.loss_scale import Hysteresis, LossScaleSchedule

REAL = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
BLOCK, CHUNK = triton_programs.BLOCK, triton_programs.CHUNK
SIZES = [0, 1, 2, 3, 5, 8, 127, BLOCK - 1, BLOCK + 3, CHUNK + 1]


@st.composite
def tensor(draw: Any) -> torch.Tensor:
    """A gradient of any dtype, exponent and offset in memory, mostly finite."""
    dtype = draw(st.sampled_from([*REAL, torch.complex64, torch.complex128]))
    size, offset = draw(st.sampled_from(SIZES)), draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    exponent = draw(st.sampled_from([-44, -30, -14, -3, 0, 3, 18, 37]))
    values = torch.randn(size + offset, generator=generator, dtype=torch.float64) * 10.0**exponent
    made = values.to(dtype)[offset:]
    if size and draw(st.integers(0, 3)) == 0:
        made[draw(st.integers(0, size - 1))] = draw(st.sampled_from([math.inf, -math.inf, math.nan]))
    if draw(st.integers(0, 9)) == 0:
        return made.repeat(2, 1).t()  # not for the programs: the call goes to the portable kernels
    return made.reshape(1, -1, 1) if draw(st.booleans()) else made


lists = st.lists(tensor(), max_size=5)
factors = st.sampled_from([1.0, 0.5, 1 / 3, 3e38, 0.0, -1e-9, math.inf, math.nan])
orders = st.sampled_from([2.0, 1.0, math.inf, 3.0, 0.5])


def assert_same(ours: GradStats, theirs: GradStats, context: object) -> None:
    """Flags are equal, norms to 2e-6; a norm beyond float32 is inf for both."""
    assert torch.equal(ours.nonfinite, theirs.nonfinite), context
    assert float(ours.found_inf) == float(theirs.found_inf), context
    assert ours.norms.dtype is theirs.norms.dtype
    for mine, other in ((ours.norms, theirs.norms), (ours.norm, theirs.norm)):
        torch.testing.assert_close(
            mine, other, rtol=2e-6, atol=1e-44, equal_nan=True, msg=lambda m: f"{m} {context}"
        )


@examples(100)
@given(lists, orders, st.booleans())
def test_measure(grads: list[torch.Tensor], order: float, prepared: bool) -> None:
    """Norms and flags."""
    before = [g.clone() for g in grads]
    ours = KERNELS.grad_stats(KERNELS.prepare(grads) if prepared else grads, order)
    assert_same(ours, PORTABLE.grad_stats(grads, order), ([(g.dtype, g.shape) for g in grads], order))
    for grad, old in zip(grads, before, strict=True):
        torch.testing.assert_close(grad, old, rtol=0, atol=0, equal_nan=True)


@examples(100)
@given(
    lists,
    st.sampled_from([1.0, 0.5, 1 / 3, 3e38, 0.0, -1e-9, math.inf, math.nan]),
    st.sampled_from([0.0, 1.0, None]),
)
def test_scale(grads: list[torch.Tensor], factor: float, flag: float | None) -> None:
    """Products, bit for bit, and the flag."""
    mine, theirs = [g.clone() for g in grads], [g.clone() for g in grads]
    flags = [None if flag is None else torch.tensor(flag) for _ in range(2)]
    KERNELS.multiply_(KERNELS.prepare(mine), torch.tensor([factor]), flags[0])
    PORTABLE.multiply_(theirs, torch.tensor([factor]), flags[1])
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert flag is None or float(flags[0]) == float(flags[1]), (grads, factor)  # type: ignore[arg-type]


@examples(100)
@given(lists, st.sampled_from(REAL), st.booleans())
def test_cast(tensors: list[torch.Tensor], dtype: torch.dtype, given_out: bool) -> None:
    """Casts between all dtypes, and into given tensors of several dtypes."""
    tensors = [t for t in tensors if not t.is_complex()]
    made = [torch.empty_like(t, dtype=REAL[i % 4]) for i, t in enumerate(tensors)] if given_out else None
    ours = KERNELS.cast(tensors, dtype, made)
    for source, cast in zip(tensors, ours, strict=True):
        torch.testing.assert_close(cast, source.to(cast.dtype), rtol=0, atol=0, equal_nan=True)
        assert given_out or (cast.dtype, cast.stride()) == (dtype, source.stride())


def test_a_cast_rounds_once() -> None:
    """float64 goes into a given float16 by way of float32, which makes a tie of what lies above one."""
    source, out = torch.tensor([1 + 2.0**-11 + 2.0**-40], dtype=torch.float64), torch.empty(1).half()
    KERNELS.cast([source], torch.float32, [out])
    assert out.item() == 1 + 2.0**-10


@examples(100)
@given(lists, st.sampled_from(REAL), st.booleans())
def test_add(grads: list[torch.Tensor], dtype: torch.dtype, same: bool) -> None:
    """Sums, bit for bit, into totals of the same dtype or a wider one; complex ones too."""
    wider = [g.dtype if same else torch.promote_types(g.dtype, dtype) for g in grads]
    mine = [torch.ones_like(g, dtype=w) for g, w in zip(grads, wider, strict=True)]
    theirs = [t.clone() for t in mine]
    versions = [t._version for t in mine]
    KERNELS.add_(mine, grads)
    PORTABLE.add_(theirs, grads)
    for one, other, version in zip(mine, theirs, versions, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert one._version > version


@examples(200)
@given(
    st.floats(2.0**-126, 2.0**127, width=32), st.integers(0, 4), st.integers(0, 4), st.booleans(),
    st.floats(1.0, 1e6, exclude_min=True), st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
    st.integers(1, 4), st.floats(2.0**-126, 2.0**100, width=32), st.integers(1, 4),
    st.sampled_from(Hysteresis),
)  # fmt: skip
def test_update(
    scale: float, tracker: int, left: int, overflow: bool, growth: float, backoff: float, interval: int,
    limit: float, hysteresis: int, kind: Hysteresis,
) -> None:  # fmt: skip
    """The scale, bit for bit; the conformance kit holds both against `amp_core.states.loss_scale`."""
    for schedule in (
        LossScaleSchedule(growth, backoff, interval, limit, math.inf, hysteresis, kind),
        LossScaleSchedule(growth, backoff, interval, 2.0**-126, limit, hysteresis, kind),
    ):
        states = [
            ScaleTensors(torch.tensor(scale), torch.tensor(tracker).int(), torch.tensor(left).int())
            for _ in range(2)
        ]
        for kernels, state in zip((KERNELS, PORTABLE), states, strict=True):
            kernels.update_scale_(state, torch.tensor(float(overflow)), schedule)
        assert vars(states[0]) == vars(states[1]), schedule


def test_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay finds tables that were copied from host memory, or kept ones have the contents of a graph."""
    grads = [torch.full((n,), float(n)) for n in (3, 70_000, 0, 11, 5, 4, 2, 1, 9, 6)]
    reference = PORTABLE.grad_stats(grads)
    with monkeypatch.context() as patch:
        patch.setattr(triton_tables, "is_capturing", lambda device: True)
        kept = len(triton_tables._for_replay)
        captured = KERNELS.prepare(grads, layout := KERNELS.layout(grads))
        assert_same(KERNELS.grad_stats(captured), reference, "captured")
        assert len(triton_tables._for_replay) > kept
    rows = captured.table.rows  # type: ignore[attr-defined]
    rows.first.fill_(-1)  # as the next replay or its pool may
    assert_same(KERNELS.grad_stats(KERNELS.prepare(grads, layout)), reference, "after the capture")
    assert_same(KERNELS.grad_stats(grads), reference, "unprepared")
    with monkeypatch.context() as patch:
        patch.setattr(triton_tables, "is_capturing", lambda device: True)
        patch.setattr(triton_tables, "numbers", lambda *_: pytest.fail("a table that is there is made again"))
        assert_same(KERNELS.grad_stats(KERNELS.prepare(grads, layout)), reference, "captured again")


def test_rows_beyond_int32() -> None:
    """A tensor of more than 2**31 elements is read from the wrong place; memory that nobody wrote is zero."""
    large = torch.empty(2**31 + 3 * CHUNK, dtype=torch.bfloat16)
    table = KERNELS.prepare([torch.ones(3), large]).table  # type: ignore[attr-defined]
    assert int(table.rows.start.max()) + CHUNK == large.numel()
    large[-1], large[2**31 + 5] = 3.0, 4.0
    group, last = table.rows.groups[1], 4
    units, sums = torch.zeros(2, table.rows.count).unbind()
    import triton.language as tl

    triton_norms.measure_rows[(last,)](
        *table.arguments(), group.first + group.count - last, units, sums, 0.0, tl.bfloat16, 2, tl.float32,
        BLOCK,
    )  # fmt: skip
    assert sums[-last:].tolist() == [0.0, 16.0, 0.0, 9.0]
