"""Fused steps that a signal breaks off between two lines."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch

from amp_core import AccumulationWindow, GradScaler
from amp_core.scaling import fused
from amp_core.scaling.step_log import StepLog

CALLERS = ("_step", "_step_plain", "_step_fused", "step")


def trained(interrupt_at: int | None) -> tuple[torch.Tensor, bool]:
    """Return a weight after a step that is broken off at the start of the given line, and another one."""
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    scaler, met = GradScaler("cpu", init_scale=64.0), False

    def tracer(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal met
        if frame.f_code is not fused.step_on_device.__code__:
            return tracer if frame.f_code is GradScaler._step_fused.__code__ else None
        if event == "line" and frame.f_lineno == interrupt_at:
            met = True
            raise KeyboardInterrupt
        return tracer

    for call in (sys.settrace, lambda _: None) if interrupt_at is not None else (lambda _: None,):
        scaler.scale(weight.square().sum()).backward()
        call(tracer)
        try:
            scaler.step(optimizer)
        except KeyboardInterrupt:
            assert torch.equal(weight, torch.ones(4))
        finally:
            sys.settrace(None)
        scaler.update()
        optimizer.zero_grad()
    return weight.detach(), met


def test_an_interrupt_before_a_fused_step_leaves_no_factor_behind() -> None:
    """The next step would divide the gradients by the scale twice."""
    code = fused.step_on_device.__code__
    lines = sorted({line for *_, line in code.co_lines() if line is not None and line > code.co_firstlineno})
    text = Path(fused.__file__).read_text(encoding="utf-8").splitlines()
    called = next(number for number, line in enumerate(text, 1) if "result = take_step(" in line)
    expected, _ = trained(None)
    for line in [line for line in lines if line <= called]:
        got, met = trained(line)
        if met:
            assert torch.equal(got, expected), line


@pytest.mark.parametrize("preset", [False, True])
def test_an_interrupt_right_after_a_fused_step_leaves_no_factor_behind(preset: bool) -> None:
    """The step is taken, and the next one divides the gradients by the scale twice."""

    def at_first_call(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call" and frame.f_code is fused._remove.__code__:
            sys.settrace(None)
            raise KeyboardInterrupt

    def trained(interrupted: bool) -> torch.Tensor:
        weight = torch.ones(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
        scaler = GradScaler("cpu", init_scale=64.0)
        if preset:
            optimizer.grad_scale = torch.tensor(2.0)
        for number in range(2):
            scaler.scale(weight.square().sum()).backward()
            with pytest.raises(KeyboardInterrupt) if interrupted and not number else contextlib.nullcontext():
                sys.settrace(at_first_call if interrupted and not number else None)
                scaler.step(optimizer)
            scaler.update(64.0)
            optimizer.zero_grad()
        return weight.detach()

    assert torch.equal(trained(True), trained(False))


def test_an_interrupt_while_a_window_is_entered_leaves_it_closed() -> None:
    """No step can be taken any more, and the window can neither be entered nor left."""
    optimizer, scaler = torch.optim.SGD([torch.ones(2, requires_grad=True)]), GradScaler("cpu")
    window, code, calls = AccumulationWindow(scaler, optimizer), AccumulationWindow.__enter__.__code__, 0

    def after_call(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal calls
        of_python = event == "return" and frame.f_back is not None and frame.f_back.f_code is code
        if of_python or (event == "c_return" and frame.f_code is code):
            calls += 1
            if calls == number:
                raise KeyboardInterrupt

    for number in range(1, 10):
        calls = 0
        sys.setprofile(after_call)
        try:
            with window:
                sys.setprofile(None)
        except KeyboardInterrupt:
            assert not scaler._scales.in_window
        finally:
            sys.setprofile(None)
        if calls < number:
            break
        with window:
            pass
    assert 1 < number < 9


def test_an_interrupt_while_a_window_begins_to_close_leaves_it_closed() -> None:
    """No step can be taken any more, and the gradients from before the window are lost."""
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    optimizers, scaler = [torch.optim.SGD([weight]) for weight in weights], GradScaler("cpu")
    window, depth, calls = AccumulationWindow(scaler, optimizers), 0, 0

    def in_exit(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal depth, calls
        if frame.f_code is AccumulationWindow.__exit__.__code__:
            depth += {"call": 1, "return": -1}.get(event, 0)
        elif depth and event in ("call", "c_return"):
            calls += 1
            if calls == number:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def run() -> None:
        with window:
            with window.micro_batch():
                scaler.scale(weights[0].sum()).backward()
            sys.setprofile(in_exit)

    for number in range(1, 8):
        depth = calls = 0
        for weight in weights:
            weight.grad = torch.full((2,), 100.0)
        with pytest.raises(KeyboardInterrupt):
            run()
        assert not scaler._scales.in_window, number
        assert [weight.grad.tolist() for weight in weights] == [[100.0, 100.0]] * 2, number


@pytest.mark.parametrize("name", ["_close", "_weigh", "_sums"])
def test_a_window_that_was_broken_off_while_it_closed(name: str) -> None:
    """Gradients from before that window are added to those of the next one."""
    weight = torch.ones(2, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight]), GradScaler("cpu", init_scale=1.0)
    window = AccumulationWindow(scaler, optimizer)
    weight.grad = torch.full((2,), 100.0)

    def run() -> None:
        with window, window.micro_batch():
            scaler.scale(weight.sum()).backward()

    with mock.patch.object(window, name, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run()
    optimizer.zero_grad(set_to_none=False)
    run()
    assert weight.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["_check", "_clear_bad"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_micro_batch_that_was_broken_off_at_its_end(name: str, number: int) -> None:
    """The gradients from before the window, or the sum, are lost, and those of the micro-batch are there."""
    weight = torch.ones(2, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight]), GradScaler("cpu", init_scale=1.0)
    window = AccumulationWindow(scaler, optimizer)
    weight.grad = torch.full((2,), 100.0)
    with window:
        for _ in range(number):
            with window.micro_batch():
                scaler.scale(weight.sum()).backward()
        before = weight.grad.tolist()
        with (
            mock.patch.object(window, name, side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
            window.micro_batch(),
        ):
            scaler.scale(weight.sum() * 7).backward()
        assert weight.grad.tolist() == before
    assert weight.grad.tolist() == [100.0 + number] * 2


class Failing(torch.optim.SGD):
    """Raises an error in its first step."""

    fails = True

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            raise KeyError
        return super().step(closure)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_a_step_that_raises_leaves_no_record(fused: bool, before: bool) -> None:
    """Hooks and schedulers are told of a step that was not taken, or twice, without what was known of it."""
    weight = torch.ones(4, requires_grad=True)
    optimizer = Failing([weight], lr=0.1, fused=fused)
    optimizer.fails = False
    scaler, told = GradScaler("cpu", init_scale=64.0), []
    scaler.register_step_hook(lambda _, record: told.append(record))
    if before:
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    earlier, optimizer.fails = list(scaler.history), True
    window = AccumulationWindow(scaler, optimizer)
    with window:
        for loss in (weight.sum(), weight.sum() * float("inf")):
            with window.micro_batch():
                scaler.scale(loss).backward()
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    assert list(scaler.history) == list(scaler.last_step.values()) == earlier
    scaler.step(optimizer)
    scaler.update()
    (record,) = scaler.history[len(earlier) :]
    assert told == [*earlier, record]
    assert (record.skipped, record.bad_micro_batches, record.scale_after) == (False, (1,), 32.0)
    assert record.bad_parameters


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_a_step_that_raises_while_the_history_is_full(size: int) -> None:
    """Each step that raises costs the history its oldest record."""
    weight = torch.ones(4, requires_grad=True)
    optimizer, scaler = Failing([weight], lr=0.1), GradScaler("cpu", history=size)
    optimizer.fails = False
    scaler.scale(weight.sum()).backward()
    for _ in range(2):
        scaler.step(optimizer)
        scaler.update()
    before, optimizer.fails = [*scaler.history], True
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    assert [*scaler.history] == before
    scaler.step(optimizer)
    assert [record.number for record in scaler.history] == [0, 1, 2][3 - size :]


@pytest.mark.parametrize("retry", ["step", "clipped step", "clip_grad_norm_"])
def test_a_fused_step_after_one_that_raised(retry: str) -> None:
    """Good gradients are skipped, and reported with a norm, for what a step that raised found in others."""
    weight = torch.ones(4, requires_grad=True)
    optimizer = Failing([weight], lr=0.1, fused=True)
    scaler = GradScaler("cpu", init_scale=64.0)
    scaler.scale(weight.sum() * float("inf")).backward()
    with pytest.raises(KeyError):
        scaler.step(optimizer, max_norm=9.0)
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    if retry == "clip_grad_norm_":
        scaler.clip_grad_norm_(optimizer, 9.0)
    scaler.step(optimizer, max_norm=9.0 if retry == "clipped step" else None)
    record = scaler.last_step[optimizer]
    assert (record.skipped, record.total_norm) == (False, None if retry == "step" else 2.0)
    assert weight.tolist() == pytest.approx([0.9] * 4)
    scaler.update()
    assert scaler.get_scale() == 64.0


def test_an_optimizer_with_the_id_of_another_one() -> None:
    """The skip of an optimizer that is gone is told to nobody."""
    weight = torch.ones(4, requires_grad=True)
    scaler, told = GradScaler("cpu", init_scale=64.0), []
    scaler.register_step_hook(lambda _, record: told.append(record.skipped))
    for factor in (float("inf"), *[1.0] * 20):
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.grad = None
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        del optimizer
    scaler.update()
    assert told == [True] + [False] * 20
    assert all(record.scale_after == 32.0 for record in scaler.history)


def test_the_scale_changes_after_a_step_that_raised() -> None:
    """No hook hears that the scale has moved, as if the step still waited for its record."""
    weight, seen = torch.ones(4, requires_grad=True), []
    optimizer = Failing([weight], lr=0.1)
    scaler = GradScaler("cpu", init_scale=64.0)
    scaler.register_scale_change_hook(lambda _, change: seen.append((change.before, change.after)))
    scaler.scale(weight.sum()).backward()
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    scaler.update(8.0)
    assert seen == [(64.0, 8.0)]


def test_a_step_that_raises_after_it_has_stepped_another_optimizer() -> None:
    """The record of the other optimizer goes, and that of the failed one stays."""
    weight, inner = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    other, scaler = torch.optim.Adam([inner]), GradScaler("cpu", init_scale=64.0)

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            scaler.step(other)
            raise KeyError

    optimizer = Outer([weight], lr=0.1)
    scaler.scale((weight + inner).sum()).backward()
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    assert [record.optimizer for record in scaler.history] == ["Adam"]
    assert [record.optimizer for record in scaler.last_step.values()] == ["Adam"]


def test_a_step_that_raises_after_that_of_another_optimizer() -> None:
    """The record of the other optimizer is never completed, and no hook hears of it."""
    one, two, told = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True), []
    other, optimizer = torch.optim.Adam([one]), Failing([two], lr=0.1)
    scaler = GradScaler("cpu", init_scale=64.0)
    scaler.register_step_hook(lambda _, record: told.append((record.optimizer, record.scale_after)))
    scaler.scale((one + two).sum()).backward()
    scaler.step(other)
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    scaler.update()
    assert told == [("Adam", 64.0)]


def test_a_step_that_raises_after_an_update() -> None:
    """The scaler's own KeyError takes the place of the error in the step."""
    weight = torch.ones(4, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler("cpu", init_scale=64.0)

    def update_and_fail(*_: object) -> None:
        scaler.update()
        raise ArithmeticError

    optimizer.register_step_post_hook(update_and_fail)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(ArithmeticError):
        scaler.step(optimizer)
    assert [record.scale_after for record in scaler.history] == [64.0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_a_step_that_is_broken_off_while_it_is_recorded(fused: bool, factor: float) -> None:
    """The history has two records of the step, one of which no update completes, or has lost an old one."""

    def records(broken_off_at: int) -> tuple[list[str], int]:
        weight = torch.ones(4, requires_grad=True)
        optimizer, lines = torch.optim.SGD([weight], lr=0.1, fused=fused), 0
        scaler, told = GradScaler("cpu", init_scale=64.0, history=2), []
        scaler.register_step_hook(lambda _, record: told.append(record))

        def tracer(frame: FrameType, event: str, _arg: object) -> Any:
            nonlocal lines
            if frame.f_code is not StepLog.record.__code__:
                return tracer if frame.f_code.co_name in CALLERS else None
            lines += event == "line"
            if event == "line" and lines == broken_off_at:
                raise KeyboardInterrupt
            return tracer

        for trace in (None, None, tracer, None):
            optimizer.zero_grad()
            scaler.scale(weight.sum() * factor).backward()
            sys.settrace(trace)
            try:
                scaler.step(optimizer)
            except KeyboardInterrupt:
                sys.settrace(None)
                scaler.step(optimizer)
            finally:
                sys.settrace(None)
            assert scaler.history[-1] is scaler.last_step[optimizer]
            scaler.update()
            assert [*map(id, scaler.history)] == [*map(id, told[-2:])]
        return list(map(str, told)), lines

    wanted, count = records(0)
    assert count > 10
    for line in range(1, count + 1):
        assert records(line)[0] == wanted, line


@pytest.mark.parametrize("between", ["nothing", "another norm", "a write", "other gradients"])
@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_a_clipped_step_that_is_taken_again(between: str, factor: float) -> None:
    """The record has the norm after clipping, or nan, and the gradients are clipped twice."""

    def taken(fails: bool) -> tuple[list[float], Any, Any]:
        weight = torch.arange(1.0, 5.0, requires_grad=True)
        unused = torch.ones(2, requires_grad=True)
        optimizer, scaler = Failing([unused, weight], lr=0.1), GradScaler("cpu", init_scale=64.0)
        optimizer.fails = fails
        scaler.scale(weight.square().sum() * factor).backward()
        if factor == 1.0 and fails:
            with pytest.raises(KeyError):
                scaler.step(optimizer, max_norm=0.5)
        elif fails:
            with (
                mock.patch.object(scaler, "_maybe_opt_step", side_effect=KeyboardInterrupt),
                pytest.raises(KeyboardInterrupt),
            ):
                scaler.step(optimizer, max_norm=0.5)
        if between == "a write" and fails:
            weight.grad.mul_(4.0)
        if between == "other gradients" and fails:
            weight.grad = weight.grad * 4.0
        scaler.step(optimizer, max_norm=0.25 if between == "another norm" else 0.5)
        record = scaler.last_step[optimizer]
        return weight.tolist(), record.total_norm, record.skipped

    wanted, got = taken(False), taken(True)
    assert got[2] == wanted[2] == (factor != 1.0)
    if between == "nothing":
        assert got == wanted
    elif factor == 1.0:
        assert got[0] == pytest.approx(wanted[0], rel=1e-6)
        assert got[1] == pytest.approx(0.5 if between == "another norm" else 2.0, rel=1e-5)


def test_a_clipped_step_that_raises_on_gradients_of_inference_mode() -> None:
    """Such gradients have no versions: torch's error of that takes the place of the optimizer's own."""
    weight = torch.ones(4, requires_grad=True)
    optimizer, scaler = Failing([weight], lr=0.1), GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    with torch.inference_mode():
        weight.grad = torch.full((4,), 64.0)
    with pytest.raises(KeyError):
        scaler.step(optimizer, max_norm=1.0)
