"""Observers come and go while other threads train."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torchs

import amp_core
from amp_core.debugging.places import Places
from amp_core.debugging.tap import Tap
from amp_core.dispatch.engine import engine

MODEL = nn.Linear(2, 2)
TOOLS: dict[str, Callable[[], Any]] = {
    "record": amp_core.record,
    "guard": lambda: amp_core.guard(MODEL),
    "watch": lambda: amp_core.watch(MODEL, every=1),
}


def hooks() -> tuple[list[int], list[int]]:
    return [*torchs._global_optimizer_pre_hooks], [*torchs._global_optimizer_post_hooks]


@pytest.mark.parametrize("tool", TOOLS)
def test_hooks_of_steps_do_not_come_and_go(tool: str) -> None:
    """Another thread that steps then raises "OrderedDict mutated during iteration" in torch."""
    with TOOLS[tool]():
        first = hooks()
    with TOOLS[tool]():
        assert hooks() == first
    assert hooks() == first


def test_a_comparison_leaves_hooks_of_steps_alone() -> None:
    """The optimizers that a compared step uses are kept by such a hook."""

    def step() -> torch.Tensor:
        return MODEL(torch.ones(2, 2)).square().mean()

    def before(*_: object) -> None:
        seen.append(hooks())

    seen: list[tuple[list[int], list[int]]] = []
    amp_core.compare(step, "cpu")
    handle = MODEL.register_forward_pre_hook(before)
    amp_core.compare(step, "cpu")
    handle.remove()
    assert seen
    assert all(each == hooks() for each in seen)


def in_another_thread(step: Callable[[], object]) -> None:
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()


def test_a_thread_that_ends_within_a_step_leaves_no_kernels() -> None:
    """Ops go through Python for good after a thread has evaluated a guarded model once."""
    kernels = engine("cpu")._users.total()
    with amp_core.guard(MODEL, steps=range(3)):
        in_another_thread(lambda: MODEL(torch.ones(1, 2)))
    recording = amp_core.record()
    in_another_thread(recording.__enter__)
    recording.__exit__(None, None, None)
    assert engine("cpu")._users.total() == kernels


def test_a_recording_leaves_out_what_other_threads_step() -> None:
    """The optimizer state of a model that another thread trains is reported as this program's."""
    mine, other = nn.Linear(2, 2), nn.Linear(2, 2)
    (mine.weight.sum() + mine.bias.sum() + other.weight.sum() + other.bias.sum()).backward()
    steps = {model: torch.optim.Adam(model.parameters()).step for model in (mine, other)}
    with amp_core.record(mine) as of_mine:
        in_another_thread(steps[other])
        assert not of_mine.tensors
        in_another_thread(steps[mine])  # as hooks of gradients do in an autograd thread
    states = {key.name for key in of_mine.tensors if key.kind == "optimizer state"}
    assert states == {"weight", "bias"}
    with amp_core.record() as r:
        in_another_thread(steps[other])
    assert not r.tensors


@pytest.mark.parametrize("shared", [False, True])
def test_a_comparison_leaves_optimizers_of_other_threads_alone(shared: bool) -> None:
    """The comparison takes back the state of another thread's Adam, but not its weights."""
    other = MODEL if shared else nn.Linear(2, 2)
    optimizer = torch.optim.Adam(other.parameters())

    def train() -> None:
        other(torch.ones(2, 2)).sum().backward()
        optimizer.step()

    def step() -> torch.Tensor:
        loss = MODEL(torch.ones(2, 2)).square().mean()
        if not shared:
            in_another_thread(train)
        else:
            loss.backward()
            in_another_thread(optimizer.step)
        return loss

    runs = amp_core.compare(step, "cpu") and (0 if shared else 2)
    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert steps == ({runs} if runs else set())


def test_recordings_of_several_threads_begin_and_end(in_threads: Callable[..., None]) -> None:
    """They lose each other's hooks, or a filter of warnings is removed twice."""
    filters = [*warnings.filters]

    def attach() -> None:
        places = Places()
        places.attach()
        places.detach()

    in_threads(*[attach] * 4, seconds=1)
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert warnings.filters == filters


def test_an_interrupt_at_the_end_of_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every module of the process stays observed, compiled ones run eagerly, and nothing can end it."""

    def stop(_tap: Tap) -> None:
        raise KeyboardInterrupt

    interrupted = amp_core.record().__enter__()
    with monkeypatch.context() as patch:
        patch.setattr(Tap, "_leave_thread", stop)
        with pytest.raises(KeyboardInterrupt):
            interrupted.__exit__(None, None, None)
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    with amp_core.record() as recording:  # ends what is left of the first one in this thread
        MODEL(torch.ones(1, 2))
    assert sum(recording.ops.values()) == 1
