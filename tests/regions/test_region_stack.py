"""Regions entered and left in any order, against a model: the last one still entered is in force."""

from __future__ import annotations

from typing import Literal

import hypothesis.strategies as st
import torch
from hypothesis import given

import amp_core

from ..drawn import examples

DEVICES = ("cpu", "xpu")
State = tuple[bool, torch.dtype]


def state(device: str) -> State:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


regions = st.tuples(st.sampled_from(DEVICES), st.sampled_from([torch.bfloat16, torch.float16]), st.booleans())
# A program enters the next of its regions, leaves the n-th of those entered, whichever it is, or lowers the
# nesting depth, as torch does where a region is left that was not entered.
programs = st.lists(st.one_of(regions, st.integers(0, 5), st.just("exit")), min_size=1, max_size=14)


@given(programs)
@examples(200)
def test_any_order(program: list[tuple[str, torch.dtype, bool] | int | Literal["exit"]]) -> None:
    """Leaving in an unusual order puts the wrong state in force, or leaves one or a cast behind."""
    weight = torch.ones(2, 2, requires_grad=True)
    base = {device: state(device) for device in DEVICES}
    entered: list[amp_core.autocast] = []
    for step in [*program, *[0] * len(program)]:
        if isinstance(step, tuple):
            device, dtype, enabled = step
            entered.append(amp_core.autocast(device, dtype=dtype, enabled=enabled).__enter__())
            torch.mm(weight, weight)
        elif step == "exit":
            torch.autocast_decrement_nesting()
        elif entered:
            entered.pop(step % len(entered)).__exit__(None, None, None)
        for device in DEVICES:
            here = [r for r in entered if r.device == device]
            expected = (here[-1]._enabled, here[-1].fast_dtype) if here else base[device]
            assert state(device) == expected
    assert not entered
    with torch.no_grad():
        weight.zero_()
    with amp_core.autocast("cpu"):
        assert not torch.mm(weight, weight).any()
    for _ in range(program.count("exit")):
        torch.autocast_increment_nesting()
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    assert depth == 1
