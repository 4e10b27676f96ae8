"""Micro-batches that overflow are left out of an accumulation window, or only named."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core import AccumulationWindow, GradScaler
from amp_core.callbacks import Logging

from ..drawn import TIMES, chance, examples

PARTS = 4


class Run:
    def __init__(self, kind: Any = torch.optim.SGD, fused: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        self.optimizer = kind(self.model.parameters(), lr=0.25, fused=fused)
        self.batch = torch.randn(PARTS, 5, 3)
        self.scaler = GradScaler("cpu", 8.0, named_parameters=self.model.named_parameters(), **options)

    def backward(self, part: int, bad: bool = False) -> None:
        self.scaler.scale(self.model(self.batch[part]).square().mean() / PARTS).backward()
        if bad:
            self.model[2].bias.grad[1] = math.nan

    def window(self, bad: set[int], **options: Any) -> None:
        self.optimizer.zero_grad()
        with AccumulationWindow(self.scaler, self.optimizer, **options) as window:
            for part in range(PARTS):
                with window.micro_batch():
                    self.backward(part, part in bad)

    def step(self) -> None:
        self.scaler.step(self.optimizer, max_norm=1.0)
        self.scaler.update()

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.clone() for p in self.model.parameters()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [set(), {0}, {3}, {1, 2}])
def test_the_sum_is_that_of_the_good_micro_batches(bad: set[int], fused: bool) -> None:
    """A bad micro-batch spoils the sum, or a good one is left out, or counted twice."""
    ours, plain = Run(fused=fused), Run(fused=fused)
    ours.window(bad, reweight=False)
    for part in sorted(set(range(PARTS)) - bad):
        plain.backward(part)
    assert same(ours.gradients(), plain.gradients())
    ours.step()
    plain.step()
    assert same(ours.parameters(), plain.parameters())
    record = ours.scaler.history[-1]
    assert (record.skipped, record.bad_micro_batches) == (False, tuple(sorted(bad)))
    assert [b.name for b in record.bad_parameters] == ["2.bias"] * bool(bad)
    assert ours.scaler.get_scale() == (4.0 if bad else 8.0)


SEGMENTS = st.lists(
    st.one_of(st.none(), st.sets(st.integers(0, PARTS - 1), max_size=PARTS - 1)), min_size=1, max_size=4
)


@examples(40)
@given(segments=SEGMENTS, leave_out=st.booleans(), one_window=st.booleans())
def test_several_windows_and_backwards_of_one_step(
    segments: list[set[int] | None], leave_out: bool, one_window: bool
) -> None:
    """A window weighs gradients that are not its own, or the record of an earlier one is lost."""
    ours, plain = Run(), Run()
    expected = [torch.zeros_like(p) for p in plain.model.parameters()]
    bad, count = [], 0
    kept = AccumulationWindow(ours.scaler, ours.optimizer, leave_out=leave_out)
    for segment in segments:
        plain.optimizer.zero_grad()
        if segment is None:
            plain.backward(0)
            ours.backward(0)
            weight = 1.0
        else:
            window = (
                kept if one_window else AccumulationWindow(ours.scaler, ours.optimizer, leave_out=leave_out)
            )
            with window:
                for part in range(PARTS):
                    with window.micro_batch():
                        ours.backward(part, part in segment)
                    if not (leave_out and part in segment):
                        plain.backward(part, part in segment)
            weight = PARTS / (PARTS - len(segment)) if leave_out else 1.0
            bad += [count + part for part in sorted(segment)][: None if leave_out else 1]
            count += PARTS
        for total, grad in zip(expected, plain.gradients(), strict=True):
            total += weight * grad
    torch.testing.assert_close(ours.gradients(), expected, equal_nan=True)
    ours.step()
    record = ours.scaler.history[-1]
    assert (record.bad_micro_batches or ()) == tuple(bad)
    assert [b.name for b in record.bad_parameters] == ["2.bias"] * bool(bad)
    assert record.skipped == (bool(bad) and not leave_out)


def test_a_mean_stays_a_mean() -> None:
    """The gradients of a window with a hole are too small, or those of a whole one are touched."""
    ours, plain = Run(), Run()
    ours.window({1})
    for part in (0, 2, 3):
        plain.backward(part)
    torch.testing.assert_close(ours.gradients(), [g * 4 / 3 for g in plain.gradients()])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True])
def test_a_window_of_bad_micro_batches_is_skipped(kind: Any, fused: bool) -> None:
    """With nothing left of the window, the optimizer steps on zeros: weight decay and momentum move it."""
    run = Run(kind, fused)
    run.window(set())
    run.step()
    before = run.parameters()
    run.window(set(range(PARTS)))
    run.step()
    record = run.scaler.last_step[run.optimizer]
    assert same(run.parameters(), before)
    assert (record.skipped, record.bad_micro_batches) == (True, (0, 1, 2, 3))
    assert [b.name for b in record.bad_parameters] == ["2.bias"]
    assert run.scaler.get_scale() == 4.0


def test_watching_alone_names_the_first_bad_micro_batch() -> None:
    """Whoever wants the whole window skipped does not learn which micro-batch was to blame."""
    run, plain = Run(), Run()
    run.window({2}, leave_out=False)
    for part in range(PARTS):
        plain.backward(part, part == 2)
    for ours, theirs in zip(run.gradients(), plain.gradients(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    before = run.parameters()
    run.step()
    assert same(run.parameters(), before)
    assert run.scaler.history[-1].bad_micro_batches == (2,)


def test_the_log_says_which(caplog: pytest.LogCaptureFixture) -> None:
    """A step that was taken on a part of its micro-batches leaves no line in the log."""
    run = Run()
    caplog.set_level(logging.WARNING, "amp_core")
    with Logging().listen(run.scaler):
        run.window({1, 3})
        run.step()
        run.window(set(range(PARTS)))
        run.step()
    assert [record.getMessage() for record in caplog.records] == [
        "SGD left micro-batch 1, 3 out of step 0: inf or NaN at scale 8 in 2.bias",
        "SGD skipped step 1: inf or NaN in micro-batch 0, 1, 2, 3 at scale 4 in 2.bias (2 of 2)",
    ]


@pytest.mark.parametrize("bad", [set(), {1, 3}])
@pytest.mark.parametrize("fused", [False, True])
def test_a_skip_for_another_reason(fused: bool, bad: set[int]) -> None:
    """A micro-batch that was left out is blamed for an inf that came into the sum elsewhere."""
    param = torch.nn.Parameter(torch.ones(2))
    scaler, optimizer = GradScaler("cpu", 8.0), torch.optim.SGD([param], lr=1.0, fused=fused)
    scaler.name_parameters([("w", param)])
    with AccumulationWindow(scaler, optimizer) as window:
        for part in range(4):
            with window.micro_batch():
                scaler.scale(param.sum() * (math.nan if part in bad else 1.0)).backward()
    param.grad[0] = math.inf  # type: ignore[index]
    scaler.step(optimizer)
    scaler.update()
    left = "; left micro-batch 1, 3 out" if bad else ""
    told = f"SGD skipped step 0: inf or NaN in the sum at scale 8 in w (1 of 2){left}"
    assert str(scaler.history[-1]) == told


@pytest.mark.parametrize("leave_out", [True, False])
def test_a_micro_batch_that_raises_is_left_out(leave_out: bool) -> None:
    """Half of a micro-batch that was given up stays in the sum."""
    run, plain = Run(), Run()
    with AccumulationWindow(run.scaler, run.optimizer, leave_out=leave_out, reweight=False) as window:
        for part in range(PARTS):
            try:
                with window.micro_batch():
                    run.backward(part)
                    if part == 1:
                        raise MemoryError
            except MemoryError:
                pass
            if part != 1:
                plain.backward(part)
    assert same(run.gradients(), plain.gradients())


def test_parameters_without_gradients() -> None:
    """A parameter that a micro-batch does not reach loses its sum, or the names slip by one."""
    first, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    named = [("first." + n, p) for n, p in first.named_parameters()]
    named += [("second." + n, p) for n, p in second.named_parameters()]
    first.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.25)
    scaler = GradScaler("cpu", 8.0, named_parameters=named)
    with AccumulationWindow(scaler, optimizer, reweight=False) as window:
        for model in (first, second, first):
            with window.micro_batch():
                scaler.scale(model(torch.ones(2)).sum()).backward()
                if model is second:
                    second.weight.grad[0, 1] = math.inf
    assert first.weight.grad.tolist() == [[16.0, 16.0]]
    assert second.weight.grad.tolist() == [[0.0, 0.0]]
    scaler.step(optimizer)
    assert [b.name for b in scaler.last_step[optimizer].bad_parameters] == ["second.weight"]


@pytest.mark.parametrize("empty", [0, 1, 3])
def test_a_micro_batch_without_gradients_is_not_a_good_one(empty: int) -> None:
    """Momentum moves the weights by gradients of zero, though all micro-batches that have any are bad."""
    run = Run()
    run.optimizer.zero_grad()
    with AccumulationWindow(run.scaler, run.optimizer) as window:
        for part in range(PARTS):
            with window.micro_batch():
                if part != empty:
                    run.backward(part, bad=True)
    run.step()
    record = run.scaler.history[-1]
    assert record.skipped
    assert record.bad_micro_batches == tuple(part for part in range(PARTS) if part != empty)


def test_a_window_serves_again() -> None:
    """What one step left in a window shows up in the next."""
    run = Run()
    window = AccumulationWindow(run.scaler, run.optimizer)
    for bad in ({1}, set(), {0, 3}):
        run.optimizer.zero_grad()
        with window:
            for part in range(PARTS):
                with window.micro_batch():
                    run.backward(part, part in bad)
        run.step()
        assert run.scaler.history[-1].bad_micro_batches == tuple(sorted(bad))


def test_keys_and_disabled_scalers() -> None:
    """A window lowers the scale of another key, or fails where scaling is switched off."""
    run = Run()
    run.optimizer.zero_grad()
    with AccumulationWindow(run.scaler, run.optimizer, key="g") as window:
        for part in range(PARTS):
            with window.micro_batch():
                run.scaler.scale(run.model(run.batch[part]).mean(), key="g").backward()
                if part == 2:
                    run.model[0].weight.grad.fill_(math.inf)
    run.scaler.step(run.optimizer, key="g")
    run.scaler.update()
    assert (run.scaler.get_scale(), run.scaler.get_scale("g")) == (8.0, 4.0)
    assert run.scaler.history[-1].bad_micro_batches == (2,)
    run.scaler = GradScaler("cpu", enabled=False)
    run.window(set())
    run.step()


def test_what_a_window_cannot_take() -> None:
    """Gradients of two scales are added up, or a sparse gradient is spoilt."""
    run = Run()
    run.window(set())
    run.scaler.unscale_(run.optimizer)
    window = AccumulationWindow(run.scaler, run.optimizer)
    with pytest.raises(RuntimeError, match="this SGD that were unscaled"), window, window.micro_batch():
        pass
    table = torch.nn.Embedding(3, 2, sparse=True)
    window = AccumulationWindow(run.scaler, torch.optim.SGD(table.parameters(), lr=0.1))
    text = r"The gradient of parameter of shape \(3, 2\) is sparse.*sparse=False"
    with pytest.raises(TypeError, match=text), window, window.micro_batch():
        run.scaler.scale(table(torch.tensor([1])).sum()).backward()
    assert table.weight.grad is None


@pytest.mark.parametrize("enabled", [True, False])
def test_micro_batches_out_of_place(enabled: bool) -> None:
    """An overflow is dropped and the scale stays, or a micro-batch has a weight that is not its own."""
    run = Run()
    run.scaler = GradScaler("cpu", 8.0, enabled=enabled)
    window = AccumulationWindow(run.scaler, run.optimizer)
    with pytest.raises(RuntimeError, match="outside of its window"), window.micro_batch():
        pass
    again = ExitStack()
    for block, text in ((window.micro_batch, "inside another micro-batch"), (lambda: window, "already open")):
        with pytest.raises(RuntimeError, match=text), window, window.micro_batch():
            again.enter_context(block())
    with window, window.micro_batch():
        run.backward(0)
    run.step()


class Waits(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_window_does_not_wait_for_the_device() -> None:
    """The check of each micro-batch waits for the device."""
    run = Run(fused=True)
    with Waits() as waits:
        run.window({1})
        run.step()
    assert waits.count == 0


def test_gradients_in_memory_of_others_are_not_kept() -> None:
    """The sum is overwritten by the next micro-batch, where gradients are views of DDP's buckets."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), GradScaler("cpu", 1.0)
    bucket = torch.zeros(5)
    scaler.scale(torch.ones(()))
    for _ in range(3):
        optimizer.zero_grad()
        with AccumulationWindow(scaler, optimizer) as window:
            for value in (1.0, 2.0, 4.0):
                with window.micro_batch():
                    bucket[1:4] = value
                    parameter.grad = bucket[1:4]
        assert parameter.grad.tolist() == [7.0] * 3
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("seed", range(int(12 * TIMES)))
def test_parameters_that_come_late(seed: int) -> None:
    """A parameter that is unfrozen, added or first used inside a window ends in a ValueError, or is lost."""
    random = chance(seed)
    first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    second.requires_grad_(False)
    optimizer, scaler = torch.optim.SGD([first, second], lr=0.0), GradScaler("cpu", 8.0)
    for _ in range(3):
        optimizer.zero_grad()
        wanted: dict[int, float] = {}
        bad = random.choice([None, 0, 1, 2])
        with AccumulationWindow(scaler, optimizer, reweight=False) as window:
            for number in range(3):
                event = random.choice(["none", "unfreeze", "add", "freeze"])
                known = sum(len(group["params"]) for group in optimizer.param_groups)
                if event == "add" and known == 2:
                    optimizer.add_param_group({"params": [third]})
                elif event in ("unfreeze", "freeze"):
                    second.requires_grad_(event == "unfreeze")
                used = [p for p in (first, second, third) if random.random() < 0.7 and p.requires_grad]
                used = [p for p in used if p is not third or optimizer.param_groups[-1]["params"][0] is third]
                with window.micro_batch():
                    if used:
                        loss = sum(p.sum() for p in used) * (math.inf if number == bad else 1.0)
                        scaler.scale(loss).backward()
                for param in used:
                    wanted[id(param)] = wanted.get(id(param), 0.0) + (0.0 if number == bad else 8.0)
        if not any(wanted.values()):  # nothing is good, so the step is skipped
            wanted = dict.fromkeys(wanted, math.nan)
        found = {id(p): float(p.grad[0]) for p in (first, second, third) if p.grad is not None}
        assert found == pytest.approx(wanted, abs=0.0, nan_ok=True)
        if found:
            scaler.step(optimizer)
            scaler.update()
            scaler.update(8.0)


@pytest.mark.parametrize("call", ["step", "step_clipped", "unscale_", "clip_grad_norm_", "update"])
def test_what_a_step_does_waits_for_the_window(call: str) -> None:
    """One wrong indent takes the step before the sum is weighed, or all micro-batches were bad."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0, weight_decay=0.5)
    scaler = GradScaler("cpu", init_scale=4.0)
    calls = {
        "step": lambda: scaler.step(optimizer),
        "step_clipped": lambda: scaler.step(optimizer, max_norm=1.0),
        "unscale_": lambda: scaler.unscale_(optimizer),
        "clip_grad_norm_": lambda: scaler.clip_grad_norm_(optimizer, 1.0),
        "update": scaler.update,
    }
    window = AccumulationWindow(scaler, optimizer)
    with window:
        for factor in (1.0, torch.nan):
            with window.micro_batch():
                scaler.scale((param * factor).sum()).backward()
            with pytest.raises(RuntimeError, match="Leave the window first"):
                calls[call]()
            with pytest.raises(RuntimeError, match="is open"), AccumulationWindow(scaler, optimizer):
                pass
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [1.0 - 2.0 - 0.5] * 2
    assert scaler.get_scale() == 2.0


def test_another_optimizer_may_step_beside_a_window() -> None:
    """A window of the generator refuses the critic's step, whose scale is its own."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    mine, other = (torch.optim.SGD([p], lr=1.0) for p in params)
    scaler = GradScaler("cpu", init_scale=4.0)
    with AccumulationWindow(scaler, mine, key="mine") as window, window.micro_batch():
        scaler.scale(params[0].sum(), key="mine").backward()
        scaler.scale(params[1].sum(), key="other").backward()
        scaler.step(other, key="other")
        scaler.update(key="other")
    scaler.step(mine, key="mine")
    scaler.update()
    assert [p.tolist() for p in params] == [[0.0, 0.0]] * 2


def test_a_copy_of_a_scaler_is_in_no_window() -> None:
    """A scaler that was copied while a window was open could never update."""
    run = Run()
    with AccumulationWindow(run.scaler, run.optimizer) as window:
        copies = [copy.deepcopy(run.scaler), pickle.loads(pickle.dumps(run.scaler))]
        with window.micro_batch():
            run.backward(0)
    for scaler in copies:
        scaler.scale(torch.ones(()))
        scaler.step(run.optimizer)
        scaler.update()


def test_gradients_cleared_within_a_window() -> None:
    """What was there before the window comes back, though ``zero_grad()`` has cleared it."""
    run, plain = Run(), Run()
    run.backward(0)
    with AccumulationWindow(run.scaler, run.optimizer) as window:
        with window.micro_batch():
            run.backward(1)
        run.optimizer.zero_grad()
        with window.micro_batch():
            run.backward(2)
    plain.backward(2)
    assert same(run.gradients(), plain.gradients())


def test_a_window_that_raises_leaves_gradients_as_they_were() -> None:
    """A program that goes on steps on a sum that nobody has weighed."""
    run = Run()
    run.backward(0)
    before = run.gradients()
    window = AccumulationWindow(run.scaler, run.optimizer)
    with suppress(KeyError), window:
        for part in range(3):
            with window.micro_batch():
                run.backward(part, bad=part == 1)
        raise KeyError
    assert same(run.gradients(), before)
    run.step()
    assert run.scaler.history[-1].bad_micro_batches == ()


def test_a_window_of_bad_micro_batches_after_good_gradients() -> None:
    """The good gradients of the step are lost with the window."""
    run, plain = Run(), Run()
    plain.backward(0)
    run.backward(0)
    with AccumulationWindow(run.scaler, run.optimizer) as window, window.micro_batch():
        run.backward(1, bad=True)
    assert same(run.gradients(), plain.gradients())


@pytest.mark.parametrize("bad", [set(), {1}])
def test_blame_goes_to_what_is_bad_outside_of_the_window(bad: set[int]) -> None:
    """The record of a skipped step names parameters that were left out, or none."""
    run = Run()
    run.window(bad)
    run.scaler.scale(run.model[0].bias.sum() * math.inf).backward()
    run.step()
    assert [b.name for b in run.scaler.history[-1].bad_parameters] == ["0.bias"]


def test_parameters_added_between_windows_are_named_once() -> None:
    """A parameter is listed for each window of the step."""
    run, more = Run(), torch.nn.Linear(2, 2)
    run.window({0})
    run.optimizer.add_param_group({"params": list(more.parameters())})
    run.scaler.name_parameters(more.named_parameters("more"))
    with AccumulationWindow(run.scaler, run.optimizer) as window:
        for part in range(2):
            with window.micro_batch():
                run.backward(part, bad=part == 1)
    run.step()
    assert [b.name for b in run.scaler.history[-1].bad_parameters] == ["2.bias"]


def test_a_window_leaves_alone_what_has_left_its_optimizer() -> None:
    """Gradients that another optimizer will step on lose the micro-batches in which this one's are bad."""
    run = Run()
    window = AccumulationWindow(run.scaler, run.optimizer)
    with window, window.micro_batch():
        run.backward(0)
    run.step()
    run.optimizer.param_groups[0]["params"] = [*run.model[2].parameters()]
    run.model.zero_grad()
    for part in range(2):
        run.backward(part)
    expected = run.model[0].weight.grad.clone()
    run.model.zero_grad()
    with window:
        for part in range(2):
            with window.micro_batch():
                run.backward(part, bad=part == 1)
    assert torch.equal(run.model[0].weight.grad, expected)
    assert run.model[2].weight.grad.isfinite().all()


def test_zeros_from_before_are_no_good_gradients() -> None:
    """A window without a good micro-batch is stepped on, if ``zero_grad(set_to_none=False)`` left zeros."""
    run = Run()
    run.backward(0)
    run.optimizer.zero_grad(set_to_none=False)
    with AccumulationWindow(run.scaler, run.optimizer) as window, window.micro_batch():
        run.backward(1, bad=True)
    before = run.parameters()
    run.step()
    assert run.scaler.history[-1].skipped
    assert same(run.parameters(), before)


@pytest.mark.parametrize("empty", [{0}, {1}, {0, 1}])
def test_micro_batches_without_gradients_lose_none_from_before(empty: set[int]) -> None:
    """A micro-batch that reaches no parameter is taken for a call of ``zero_grad()``."""
    run, plain = Run(), Run()
    run.backward(0)
    plain.backward(0)
    with AccumulationWindow(run.scaler, run.optimizer) as window:
        for part in range(2):
            with window.micro_batch():
                if part not in empty:
                    run.backward(part)
                    plain.backward(part)
    assert same(run.gradients(), plain.gradients())
