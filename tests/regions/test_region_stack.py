"""Regions entered and left in any order, against a model: the last one still entered is in force."""

from __future__ import annotations

from typing import Literal

import hypothesis.strategies as st
import torch
from hypothesis import given

import amp_core
from amp_core.dispatch.activate import pushed

from ..drawn import examples

DEVICES = ("cpu", "xpu")
State = tuple[bool, torch.dtype]


def state(device: str) -> State:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


POLICY = amp_core.OpPolicy.uniform("cpu")
Region = tuple[str, torch.dtype, bool, amp_core.OpPolicy | None]
regions: st.SearchStrategy[Region] = st.one_of(
    st.tuples(
        st.sampled_from(DEVICES), st.sampled_from([torch.bfloat16, torch.float16]), st.booleans(), st.none()
    ),
    st.tuples(st.just("cpu"), st.just(torch.bfloat16), st.just(True), st.just(POLICY)),
)
# A program enters the next of its regions, leaves the n-th of those entered, whichever it is, or lowers the
# nesting depth, as torch does where a region is left that was not entered.
programs = st.lists(st.one_of(regions, st.integers(0, 5), st.just("exit")), min_size=1, max_size=14)


@given(programs)
@examples(200)
def test_any_order(program: list[Region | int | Literal["exit"]]) -> None:
    """Leaving in an unusual order puts the wrong state in force, or leaves one, a policy or a cast behind."""
    weight = torch.ones(2, 2, requires_grad=True)
    base = {device: state(device) for device in DEVICES}
    entered: list[amp_core.autocast] = []
    with_policy: list[amp_core.autocast] = []
    for step in [*program, *[0] * len(program)]:
        if isinstance(step, tuple):
            device, dtype, enabled, policy = step
            region = amp_core.autocast(device, dtype=dtype, enabled=enabled, policy=policy)
            entered.append(region.__enter__())
            with_policy += [region] if policy is POLICY else []
            torch.mm(weight, weight)
        elif step == "exit":
            torch.autocast_decrement_nesting()
        elif entered:
            entered.pop(step % len(entered)).__exit__(None, None, None)
        for device in DEVICES:
            here = [r for r in entered if r.device == device]
            expected = (here[-1]._enabled, here[-1].fast_dtype) if here else base[device]
            assert state(device) == expected
        assert pushed() == sum(region in with_policy for region in entered)
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


def test_a_region_that_compiled_code_has_not_left_ends_with_the_one_around_it() -> None:
    """After regions were left in another order, the depth stays too high, and casts outlive all regions."""
    first, second = (amp_core.autocast("cpu").__enter__() for _ in range(2))
    first.__exit__(None, None, None)
    torch.autocast_increment_nesting()  # as compiled code that raises leaves it
    second.__exit__(None, None, None)
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    assert depth == 1
