"""Accumulation windows of optimizers that step as one do what one optimizer of all parameters would."""

from __future__ import annotations

import math
import random
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_core import AccumulationWindow, GradScaler

from ..drawn import TIMES, chance
from .test_accumulation_window import Waits

PARTS = 3
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


class Run:
    """A model whose layers have an optimizer each, or share one."""

    def __init__(self, several: bool, fused: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        parts: list[Any] = [self.model[2], self.model[0]] if several else [self.model]
        self.optimizers = [
            torch.optim.SGD(part.parameters(), lr=0.25, momentum=0.5, fused=fused) for part in parts
        ]
        self.batch = torch.randn(8, 5, 3)
        self.scaler = GradScaler("cpu", 8.0, named_parameters=self.model.named_parameters())
        self.window = AccumulationWindow(self.scaler, self.optimizers, **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def backward(self, part: int, bad: str = "") -> None:
        self.scaler.scale(self.model(self.batch[part]).square().mean()).backward()
        if bad:
            grad = self.model.get_parameter(bad).grad
            assert grad is not None
            grad.view(-1)[-1] = math.nan

    def accumulate(self, *bad: str) -> None:
        with self.window:
            for part, name in enumerate(bad):
                with self.window.micro_batch():
                    self.backward(part, name)

    def step(self, how: str) -> None:
        if how == "clip":
            self.scaler.clip_grad_norm_(self.optimizers, 1.0)
        elif how == "unscale":
            self.scaler.unscale_(self.optimizers)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def gradients(self) -> list[Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]

    def state(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def records(self) -> list[Any]:
        return [self.scaler.last_step[optimizer] for optimizer in self.optimizers]

    def bad_parameters(self) -> list[list[str]]:
        return [[bad.name for bad in record.bad_parameters] for record in self.records()]


def equal(ours: Any, theirs: Any) -> bool:
    try:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("seed", range(int(30 * TIMES)))
def test_several_optimizers_are_as_one_of_all_parameters(seed: int) -> None:
    """One keeps a micro-batch that another has lost, or steps alone, or a wrong parameter is named."""
    draw = chance(seed)
    options = {"leave_out": draw.random() < 0.8, "reweight": draw.random() < 0.5}
    fused = draw.random() < 0.5
    ours, one = Run(True, fused, **options), Run(False, fused, **options)
    for _ in range(3):
        program = _program(draw)
        for run in (ours, one):
            _run(run, *program)
        torch.testing.assert_close(ours.state(), one.state())  # the norm is that of another order
        assert ours.scaler.get_scale() == one.scaler.get_scale()
        (record,) = one.records()
        for mine in ours.records():
            assert mine.skipped == record.skipped
            assert mine.bad_micro_batches == record.bad_micro_batches
        assert sorted(chain(*ours.bad_parameters())) == sorted(*one.bad_parameters())


def _program(draw: random.Random) -> tuple[str, list[list[str]], str, str]:
    """Draw what comes before the windows of one step, what is bad in each, and what comes after them."""
    before = draw.choice(["nothing", "zeros", "gradients"])
    how = draw.choice(["clip", "unscale"])  # only the first finds out which parameters are bad, on the device
    count, after = (draw.choice([1, 2]), draw.choice(["", "", "2.bias"])) if how == "clip" else (1, "")
    windows = [
        [draw.choice(NAMES) if draw.random() < 0.5 else "" for _ in range(draw.randint(1, PARTS))]
        for _ in range(count)
    ]
    return before, windows, how, after


def _run(run: Run, before: str, windows: list[list[str]], how: str, after: str) -> None:
    run.zero_grad()
    if before != "nothing":
        run.backward(7)
    if before == "zeros":
        run.zero_grad(set_to_none=False)
    for bad in windows:
        run.accumulate(*bad)
    if after:
        run.backward(6, after)
    run.step(how)


@pytest.mark.parametrize("bad", NAMES)
def test_a_micro_batch_is_lost_by_all(bad: str) -> None:
    """The parts of a model step on sums of different micro-batches."""
    run, plain = Run(True, reweight=False), Run(True)
    run.accumulate("", bad, "")
    for part in (0, 2):
        plain.backward(part)
    assert equal(run.gradients(), plain.gradients())
    run.step("clip")
    assert run.bad_parameters() == [
        [bad] if bad.startswith("2") else [],
        [bad] if bad.startswith("0") else [],
    ]
    assert [record.bad_micro_batches for record in run.records()] == [(1,), (1,)]
    assert not any(record.skipped for record in run.records())
    assert run.scaler.get_scale() == 4.0


@pytest.mark.parametrize("how", ["clip", "unscale"])
@pytest.mark.parametrize("fused", [False, True])
def test_no_optimizer_steps_on_zeros(fused: bool, how: str) -> None:
    """An optimizer whose gradients were finite moves by its momentum, or the record blames its parameters."""
    run = Run(True, fused)
    run.accumulate("", "", "")
    run.step("clip")
    before = run.state()
    run.zero_grad()
    run.accumulate("0.bias", "0.weight", "0.bias")
    run.step(how)
    assert all(record.skipped for record in run.records())
    assert equal(run.state(), before)
    assert [set(names) for names in run.bad_parameters()] == [set(), {"0.weight", "0.bias"}]


@pytest.mark.parametrize("windows", [1, 2])
def test_none_may_step_alone(windows: int) -> None:
    """After a window without a good micro-batch, one part of the model steps on zeros."""
    run = Run(True)
    for _ in range(windows):
        run.accumulate("0.bias")
    calls = [
        lambda: run.scaler.step(run.optimizers[0]),
        lambda: run.scaler.step(run.optimizers[1], max_norm=1.0),
        lambda: run.scaler.unscale_(run.optimizers[0]),
        lambda: run.scaler.clip_grad_norm_([run.optimizers[0]], 1.0),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"of 2 optimizers, which must step as one\. Pass all"):
            call()
    run.step("unscale")
    assert all(record.skipped for record in run.records())


@pytest.mark.parametrize("how", ["clip", "unscale"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_skip_for_another_optimizer_is_not_blamed_on_the_window(fused: bool, how: str) -> None:
    """The record names a parameter whose bad micro-batch is not in the sum."""
    run = Run(True, fused)
    run.accumulate("", "0.bias", "")
    run.backward(3, "2.bias")
    run.step(how)
    assert all(record.skipped for record in run.records())
    assert run.bad_parameters() == [["2.bias"], []]


def test_an_optimizer_without_gradients() -> None:
    """A window ends in an error if nothing reaches the parameters of one of its optimizers."""
    run = Run(True)
    for parameter in run.model[2].parameters():
        parameter.requires_grad_(False)
    before = run.state()
    run.accumulate("0.bias")
    run.step("unscale")
    assert equal(run.state(), before)
    assert run.bad_parameters() == [[], ["0.bias"]]


def test_what_a_window_of_several_refuses() -> None:
    """A gradient counts twice, or a step within the window goes unseen."""
    run = Run(True)
    with pytest.raises(ValueError, match="of 0 optimizers"):
        AccumulationWindow(run.scaler, [])
    for wrong in (run.optimizers[0], torch.optim.SGD(run.model.parameters(), lr=0.1)):
        with pytest.raises(ValueError, match="a parameter in common"):
            AccumulationWindow(run.scaler, [run.optimizers[0], wrong])
    with pytest.raises(TypeError, match=r"needs a torch\.optim\.Optimizer, not Linear"):
        AccumulationWindow(run.scaler, [run.optimizers[0], run.model[2]])
    other = AccumulationWindow(run.scaler, run.optimizers[1])
    with other, pytest.raises(RuntimeError, match="Another AccumulationWindow of this SGD"), run.window:
        pass
    with run.window:
        for optimizer in run.optimizers:
            with pytest.raises(RuntimeError, match="inside an AccumulationWindow"):
                run.scaler.step(optimizer)
    run.backward(0)
    run.step("clip")


def test_a_group_that_shares_a_parameter_comes_late() -> None:
    """A parameter that two optimizers have got since the window was made counts twice."""
    run = Run(True)
    run.optimizers[0].add_param_group({"params": list(run.model[0].parameters())})
    with pytest.raises(ValueError, match="a parameter in common"):
        run.accumulate("")
    assert not run.scaler._scales.in_window


def test_the_window_does_not_wait_for_the_device() -> None:
    """The parameters of each optimizer are picked out by an index, which is copied to the device."""
    run = Run(True, fused=True)
    with Waits() as waits:
        run.accumulate("", "0.bias", "")
        run.step("clip")
    assert waits.count == 0
