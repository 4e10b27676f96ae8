"""Random windows of micro-batches against the sums written out: odd memory, odd surroundings."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_core import AccumulationWindow, GradScaler
from amp_core.testing.suite.data import default_dtype

from ..drawn import examples

SCALE = 8.0
SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": contextlib.nullcontext,
    "meta": lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "float64": lambda: default_dtype(torch.float64),
}


class Memory:
    """Where the gradients of one parameter are: each kind writes as autograd, or a reducer, would."""

    def __init__(self, kind: str, param: Tensor) -> None:
        self.kind, self.param = kind, param
        self.bucket = torch.zeros(param.numel() + 3, dtype=param.dtype, device="cpu")

    @torch.no_grad()
    def add(self, gradient: Tensor) -> None:
        param = self.param
        if self.kind == "bucket":  # as gradient_as_bucket_view: the same memory in every micro-batch
            view = self.bucket[2:-1].view_as(param)
            view.copy_(gradient if param.grad is None else param.grad + gradient)
            param.grad = view
        elif param.grad is not None:
            param.grad.add_(gradient)
        elif self.kind == "negated":
            param.grad = torch._neg_view(-gradient)
        elif self.kind == "transposed":
            param.grad = gradient.t().clone().t()
        elif self.kind == "expanded":
            self.bucket.fill_(math.nan)  # its neighbours in memory are not of the gradient
            param.grad = self.bucket[2:-1].view_as(param)
            param.grad.copy_(gradient)
        else:
            param.grad = gradient.clone()


KINDS = ("own", "bucket", "negated", "transposed", "expanded")


@dataclass(frozen=True)
class MicroBatch:
    """The seeds of the gradients, None where a parameter gets none, and whether one of them is inf."""

    seeds: tuple[int | None, ...]
    bad: bool


micro_batches = st.builds(
    MicroBatch, st.tuples(*[st.none() | st.integers(0, 99)] * 3), st.booleans() | st.just(False)
)
programs = st.fixed_dictionaries(
    {
        "kinds": st.tuples(*[st.sampled_from(KINDS)] * 3),
        "windows": st.lists(st.lists(micro_batches, min_size=1, max_size=3), min_size=1, max_size=3),
        "late": st.booleans(),
        "use_window": st.booleans(),
        "reweight": st.booleans(),
        "fused": st.booleans(),
        "max_norm": st.sampled_from([None, 0.5, 1e6]),
        "surroundings": st.sampled_from(sorted(SURROUNDINGS)),
    }
)


def gradient_of(seed: int, bad: bool) -> Tensor:
    numbers = torch.arange(6, dtype=torch.float32, device="cpu") * (2 * seed + 1)
    gradient = (numbers.remainder(13) - 6).reshape(2, 3)
    if bad:
        gradient[1, 1] = math.inf
    return gradient


def wanted_step(window: list[MicroBatch], program: dict[str, Any]) -> list[Tensor] | None:
    """Return what the step subtracts from each parameter, in float64; None if it is skipped."""
    used = [m for m in window if any(seed is not None for seed in m.seeds)]
    bad = [m for m in used if m.bad]
    counted = window
    if bad and program["use_window"]:
        counted = [m for m in window if m not in bad]
    if not used or (bad and (not program["use_window"] or len(bad) == len(used))):
        return None
    reweight = program["use_window"] and program["reweight"]
    factor = len(used) / (len(used) - len(bad)) if reweight else 1.0
    sums = [torch.zeros(2, 3, dtype=torch.float64) for _ in range(3)]
    for micro_batch in counted:
        for total, seed in zip(sums, micro_batch.seeds, strict=True):
            if seed is not None:
                total += gradient_of(seed, False).double() * factor
    norm = math.sqrt(sum(float(total.square().sum()) for total in sums))
    limit = program["max_norm"]
    share = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
    return [total * share for total in sums]


def backward(memories: list[Memory], micro_batch: MicroBatch) -> None:
    bad = micro_batch.bad
    for memory, seed in zip(memories, micro_batch.seeds, strict=True):
        if seed is not None:
            memory.add(gradient_of(seed, bad) * SCALE)
            bad = False  # one gradient is enough


def take_step(
    scaler: GradScaler,
    optimizer: Any,
    memories: list[Memory],
    window: list[MicroBatch],
    program: dict[str, Any],
) -> None:
    around = AccumulationWindow(scaler, optimizer, reweight=program["reweight"])
    with around if program["use_window"] else contextlib.nullcontext():
        for number, micro_batch in enumerate(window):
            with around.micro_batch() if program["use_window"] else contextlib.nullcontext():
                known = {id(p) for group in optimizer.param_groups for p in group["params"]}
                if id(memories[2].param) not in known and number == 0:
                    optimizer.add_param_group({"params": [memories[2].param]})
                backward(memories, micro_batch)
    scaler.step(optimizer, max_norm=program["max_norm"])


def start(program: dict[str, Any]) -> tuple[list[Memory], torch.optim.Optimizer]:
    params = [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(3)]
    kinds = [
        "own" if k == "negated" and program["fused"] else k for k in program["kinds"]
    ]  # torch refuses it
    memories = [Memory(kind, param) for kind, param in zip(kinds, params, strict=True)]
    return memories, torch.optim.SGD(params[: 2 if program["late"] else 3], lr=1.0, fused=program["fused"])


def windows_of(program: dict[str, Any]) -> list[list[MicroBatch]]:
    """Return the windows with a gradient: a step without any is an error, in torch too."""
    return [w for w in program["windows"] if any(seed is not None for m in w for seed in m.seeds)]


@examples(80)
@given(program=programs)
def test_random_steps(program: dict[str, Any]) -> None:
    """Memory of somebody else, or a tensor of the wrong device or sign, gives a wrong step in silence."""
    memories, optimizer = start(program)
    params = [memory.param for memory in memories]
    for window in windows_of(program):
        scaler = GradScaler("cpu", SCALE)
        scaler.scale(torch.ones(()))
        optimizer.zero_grad()
        before = [p.detach().clone() for p in params]
        with SURROUNDINGS[program["surroundings"]]():
            take_step(scaler, optimizer, memories, window, program)
            scaler.update()
        wanted = wanted_step(window, program)
        assert scaler.last_step[optimizer].skipped == (wanted is None)
        for param, old, change in zip(params, before, wanted or [torch.zeros(2, 3)] * 3, strict=True):
            torch.testing.assert_close((old - param.detach()).double(), change.double(), rtol=1e-5, atol=1e-5)
        anything_bad = any(m.bad and any(s is not None for s in m.seeds) for m in window)
        assert scaler.get_scale() == (SCALE / 2 if anything_bad else SCALE)


@examples(30)
@given(program=programs)
def test_random_steps_of_fake_tensors(program: dict[str, Any]) -> None:
    """An estimate of memory under FakeTensorMode ends in a question for data that nobody has."""
    program = {**program, "fused": True, "surroundings": "none"}  # other steps ask in torch too
    with FakeTensorMode():
        memories, optimizer = start(program)
        for window in windows_of(program):
            scaler = GradScaler("cpu", SCALE)
            scaler.scale(torch.ones(()))
            optimizer.zero_grad()
            take_step(scaler, optimizer, memories, window, program)
            scaler.update()
        assert all(memory.param.shape == (2, 3) for memory in memories)
