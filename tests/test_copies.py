"""Copies and pickles of models to which something is attached: EMA copies, `torch.save`, `mp.spawn`."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_core
from amp_core import GradScaler, NonFiniteError, OpPolicy, PrecisionPlan, Recipe, autocast
from amp_core.callbacks import SkipAwareScheduler
from amp_core.debugging.guard import Guard

POLICY = OpPolicy.default("cpu")
ATTACH: dict[str, Callable[[nn.Module, Any], Any]] = {
    "cached_casts": lambda model, _: amp_core.cached_casts(model, persistent=True),
    "master_weights": lambda model, _: amp_core.master_weights(model),
    "stored weights": lambda model, optimizer: amp_core.master_weights(model, optimizer, "remainder"),
    "lost updates": amp_core.count_lost_updates,
    "guard": lambda model, _: amp_core.guard(model),
    "watch": lambda model, _: amp_core.watch(model, every=1),
    "policy of a module": lambda model, _: amp_core.apply_policy(model, {"1": "fp32"}),
    "rules of a module": lambda model, _: amp_core.apply_policy(model, {"1": {"linear": "fp32"}}),
    "plan": lambda model, _: PrecisionPlan(POLICY, {"1": "fp32"}, float32_buffers=("*",)).apply(model),
}
COPY: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}
X = torch.ones(2, 4)


def make(attach: str) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """Return a model, its handle and its optimizer after a step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_buffer("angles", torch.ones(2))
    if attach == "stored weights":
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = ATTACH[attach](model, optimizer)
    run(model).float().sum().backward()
    optimizer.step()
    return model, handle, optimizer


def run(model: nn.Module) -> torch.Tensor:
    with autocast("cpu", dtype=torch.bfloat16):
        return model(X.to(model[0].weight.dtype))  # type: ignore[index]


@pytest.mark.parametrize("duplicate", COPY)
@pytest.mark.parametrize("attach", ATTACH)
def test_a_copy_computes_what_the_model_does(attach: str, duplicate: str) -> None:
    """A copied or saved model lost its rules without a word, or could not be pickled at all."""
    model, handle, _ = make(attach)
    try:
        twin = COPY[duplicate](model)
        ours, theirs = run(model), run(twin)
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)
        handle.remove()
        assert torch.equal(run(twin), theirs)
    finally:
        handle.remove()


@pytest.mark.parametrize("duplicate", COPY)
@pytest.mark.parametrize("tool", [amp_core.guard, lambda model: amp_core.watch(model, every=1)])
def test_a_copy_is_not_observed(tool: Callable[[nn.Module], Any], duplicate: str) -> None:
    """An EMA copy of a guarded model goes on being guarded when the guard is removed."""
    model = nn.Linear(4, 4)
    with tool(model) as handle:
        model(X).sum().backward()
        twin = COPY[duplicate](model)
        step = handle.step
        twin(X * torch.inf)
        assert handle.step == step
        of_handle = COPY[duplicate](handle)
        assert of_handle.step == step
        of_handle.remove()
        model(X)
        assert (handle.step, of_handle.step) == (step + 1, step)
        if isinstance(handle, Guard):
            with pytest.raises(NonFiniteError):
                model(X * torch.inf)


@pytest.mark.parametrize("attach", ["cached_casts", "master_weights", "stored weights", "lost updates"])
@pytest.mark.parametrize("duplicate", COPY)
def test_handles_of_weights_refuse_copies_in_words(attach: str, duplicate: str) -> None:
    """A handle kept in the model ends an EMA copy with "cannot pickle '_thread.lock' object"."""
    model, handle, _ = make(attach)
    model.handle = handle
    try:
        with pytest.raises(TypeError, match="Keep it outside of the model"):
            COPY[duplicate](model)
        del model.handle
        COPY[duplicate](model)
    finally:
        handle.remove()


@pytest.mark.parametrize("duplicate", COPY)
def test_delayed_scales_refuse_copies_in_words(duplicate: str) -> None:
    """The copy knows another model's weights, or an error about a local object ends the save."""
    scales = amp_core.delayed_scales(nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"in state_dict\(\), which"):
        COPY[duplicate](scales)


@pytest.mark.parametrize("state", ["fresh", "active", "over"])
@pytest.mark.parametrize("duplicate", COPY)
def test_a_recording_is_copied_with_what_it_found(duplicate: str, state: str) -> None:
    """An error about a local object ends the worker that sends its recording to another process."""
    model = nn.Linear(4, 4)
    policy = POLICY.override({"linear": Recipe.mxfp8()})
    recording = amp_core.record(model, plan=PrecisionPlan(POLICY))
    with contextlib.ExitStack() as stack:
        if state != "fresh":
            stack.enter_context(recording)
            with autocast("cpu", policy=policy):
                model(X).sum().backward()
        if state == "over":
            stack.close()
        twin = COPY[duplicate](recording)
    assert (twin.ops, twin.casts, twin.environment) == (recording.ops, recording.casts, recording.environment)
    assert twin.quantized == recording.quantized
    assert bool(twin.ops) is (state != "fresh")
    if state == "over":
        assert str(twin) == str(recording)
    before = sum(recording.ops.values())
    with twin, autocast("cpu"):
        model(X)
    assert sum(recording.ops.values()) == before


@pytest.mark.parametrize("duplicate", COPY)
def test_kernels_are_copied(duplicate: str) -> None:
    """An optimizer that keeps the CPU's kernels cannot be copied: "ctypes objects containing pointers"."""
    kernels = amp_core.get_backend("cpu").kernels()
    twin = COPY[duplicate](kernels)
    assert twin.name == kernels.name
    assert torch.equal(twin.cast([X], torch.bfloat16)[0], X.bfloat16())


@pytest.mark.parametrize("first", [0, 1])
def test_each_handle_removes_its_own_part(first: int) -> None:
    """The first handle to go takes with it what the other one attached, also when it is removed again."""
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("angles", torch.ones(2))
    plans = [PrecisionPlan(POLICY, float32_buffers=("angles",)).apply(model) for _ in range(2)]
    plans[first].remove()
    plans[first].remove()
    assert model.bfloat16().get_buffer("angles").dtype is torch.float32
    plans[1 - first].remove()
    assert model.bfloat16().get_buffer("angles").dtype is torch.bfloat16


@pytest.mark.parametrize("attach", [name for name in ATTACH if name != "cached_casts"])
def test_a_handle_serves_one_block(attach: str) -> None:
    """A handle that was left has no effect in the next block: training goes on without its rules or guard."""
    _, handle, _ = make(attach)
    with handle:
        pass
    with pytest.raises(RuntimeError, match=r"entered before|were removed"), handle:
        pass


class Counter:
    """What a scheduler has."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_skip_aware_handles_remove_their_own_part(order: tuple[int, int]) -> None:
    """Removing a handle a second time, or the earlier of two, ends the other one as well."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    scaler.scale(model(X * torch.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    counter = Counter(optimizer)
    handles = [SkipAwareScheduler(counter, scaler) for _ in range(2)]
    handles[order[0]].remove()
    handles[order[0]].remove()
    counter.step()
    assert counter.steps == 0
    handles[order[1]].remove()
    counter.step()
    assert counter.steps == 1
