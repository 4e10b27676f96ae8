"""Regions that an interrupt, a signal or another thread's exception, breaks off between two bytecodes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Set
from types import FrameType
from typing import Any

import pytest
import torch

import amp_core
from amp_core.dispatch import activate, engine
from amp_core.regions import autocast_state, base, disabling, modules, region, replaced_forward
from amp_core.states import region_stack

FILES = {
    module.__file__ for module in (activate, engine, autocast_state, base, disabling, region, region_stack)
}
X = torch.ones(2, 2)


class Interrupt(BaseException):
    """What the tracer below raises."""


def state() -> tuple[object, ...]:
    thread = engine.policies_in_force(), activate.pushed(), len(region_stack.thread.regions)
    return (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), (X @ X).dtype, *thread)


def interrupted_at(
    number: int,
    function: Callable[[], None],
    interrupt: Callable[[], None] | None = None,
    files: Set[str | None] = FILES,
) -> bool:
    """Run `function`, and at its bytecode of that number `interrupt`, which raises if None is given.

    Returns whether it has so many.
    """
    count = 0

    def tracer(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == number:
                sys.settrace(None)
                if interrupt is None:
                    raise Interrupt
                interrupt()
        return tracer

    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces opcodes if a frame wants them by now
    sys.settrace(tracer)
    try:
        function()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    return count >= number


def excess() -> int:
    """Take back and return what an interrupt left of torch's count.

    The tracer also raises between the count and the note of it, where CPython takes no interrupt.
    """
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    return depth


def test_an_interrupt_at_every_bytecode() -> None:
    """An interrupt while a region is entered or left leaves it in force, even after the next one."""
    tested = amp_core.autocast("cpu", dtype=torch.float16)

    def enter_and_leave() -> None:
        with tested:
            pass

    enter_and_leave()
    before, number, lasting = state(), 1, 0
    while interrupted_at(number, enter_and_leave):
        number += 1
        if state() != before:
            lasting += 1
            while region_stack.thread.regions:  # CPython took the interrupt before __exit__ began
                region_stack.thread.regions[-1].region.__exit__(None, None, None)
            with tested:
                pass
        assert state() == before
        assert excess() in (0, 1)
    assert number > 50
    assert lasting < 60, f"{lasting} of {number} bytecodes leave the region in force until the next one"


def test_an_interrupt_right_after_torch_has_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The region is counted, nobody notes it, and the thread seems to be in a region for good."""
    interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
    here = ctypes.c_ulong(threading.get_ident())
    ask = functools.partial(interrupt, here, ctypes.py_object(Interrupt))
    both = zip(autocast_state._entries, iter(ask, None), strict=False)  # no bytecode runs between the two
    with monkeypatch.context() as patched:
        patched.setattr(autocast_state, "_entries", map(operator.itemgetter(0), both))
        with pytest.raises(Interrupt), amp_core.autocast("cpu"):
            pass
    assert excess() == 0
    assert not region_stack.thread.regions


def test_an_interrupt_in_a_quantised_product() -> None:
    """The product switched autocast off and never on again, which switches it on after the region."""
    weight = torch.ones(2, 2, requires_grad=True)
    policy = amp_core.OpPolicy.default("cpu").override({"mm": amp_core.Recipe.fp8_tensorwise()})

    def product() -> None:
        with amp_core.autocast("cpu", policy=policy):
            torch.mm(X, weight).sum().backward()

    product()
    number = 1
    while interrupted_at(number, product, files={contextlib.__file__}):
        number += 1
        assert not torch.is_autocast_enabled("cpu"), number
    assert number > 20


def test_an_interrupt_while_rules_of_modules_are_applied() -> None:
    """Some modules keep rules that nobody has the handle of, and compute in another precision for good."""
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(3)])
    handles: list[modules.AppliedPolicy] = []

    def apply() -> None:
        handles.append(modules.apply_policy(model, {"*": "fp32"}))

    number, lasting = 1, 0
    while interrupted_at(number, apply, files={modules.__file__, replaced_forward.__file__}):
        number += 1
        left = sum("forward" in module.__dict__ for module in model)
        assert left in (0, 3), number
        lasting += bool(left)
        for module in model if left else ():  # the interrupt came when the handle was on its way
            for key in replaced_forward._KEYS:
                del module.__dict__[key]
    assert number > 300
    assert lasting < 5
    handles[0].remove()
    assert not any("forward" in module.__dict__ for module in model)


def test_an_interrupt_while_rules_of_modules_are_removed() -> None:
    """Some modules keep their rules, and the next call of remove() refuses to remove them."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    before, number = [set(vars(module)) for module in model], 1
    files = {modules.__file__, replaced_forward.__file__}
    was_interrupted = True
    while was_interrupted:
        applied = amp_core.apply_policy(model, {"*": "fp32"})
        was_interrupted = interrupted_at(number, applied.remove, files=files)
        applied.remove()
        assert [set(vars(module)) for module in model] == before
        assert not any(module._forward_pre_hooks for module in model)
        number += 1
    assert number > 50


def test_threads_share_a_disabling_decorator() -> None:
    """One thread leaves the disabled region of another, and its mixed precision stays off."""
    wrong: list[object] = []

    @amp_core.disable()
    def product(a: torch.Tensor) -> torch.Tensor:
        return a @ a

    def work() -> None:
        with amp_core.autocast("cpu"):
            for _ in range(200):
                if product(X).dtype is not torch.float32 or (X @ X).dtype is not torch.bfloat16:
                    wrong.append(state())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_policy_that_is_gone_is_freed() -> None:
    """Every policy that was ever entered stays in memory."""
    policies = [
        amp_core.OpPolicy.default("cpu").override({"mm": "fp32"}, origin=str(number)) for number in range(300)
    ]
    activations = []
    for policy in policies:
        entered = amp_core.autocast("cpu", policy=policy)
        with entered:
            pass
        activations.append(weakref.ref(entered._activation))
    del policies, policy, entered
    gc.collect()
    assert sum(reference() is not None for reference in activations) <= 256


def test_an_interrupt_in_disable_stays_an_interrupt() -> None:
    """The clean-up leaves a region whose entry was stopped, and an error hides this interrupt or the next."""

    def enter_and_leave() -> None:
        with amp_core.autocast("cpu"), amp_core.disable():
            pass

    enter_and_leave()
    before, number = state(), 1
    while interrupted_at(number, enter_and_leave):
        number += 1
        while region_stack.thread.regions:  # CPython took the interrupt before __exit__ began
            region_stack.thread.regions[-1].region.__exit__(None, None, None)
        assert excess() in (0, 1)
        enter_and_leave()
        assert state() == before
    assert number > 100


@pytest.mark.parametrize("shared", [False, True])
def test_collected_generators_may_enter_regions(shared: bool) -> None:
    """The garbage collector closes a decorated generator while a region is entered: it stays on for good."""
    policy = amp_core.OpPolicy.default("cpu").override({"softmax": "fp32"})
    low = amp_core.autocast("cpu", dtype=torch.float16, policy=policy)
    other = low if shared else amp_core.autocast("cpu", cache_enabled=False, policy=policy)
    before = state()

    def finalise() -> None:
        with other:
            torch.softmax(X, -1)

    def enter_and_leave() -> None:
        with low:
            found.append((X @ X).dtype)

    for number in itertools.count(1):
        found: list[torch.dtype] = []
        reached = interrupted_at(number, enter_and_leave, finalise)
        assert (found, state(), excess()) == ([torch.float16], before, 0)
        if not reached:
            break
    assert number > 100
