"""One model, its casts and its gradients in several threads."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from amp_core import OpPolicy, Recipe, autocast, cached_casts, compare, delayed_scales, master_weights
from amp_core.casts import accumulating, bulk, cache

InThreads = Callable[..., None]
THREADS = 4


@pytest.mark.parametrize("scope", [contextlib.nullcontext, cached_casts, master_weights])
def test_backward_passes_add_up(scope: Any, in_threads: InThreads) -> None:
    """A thread's gradient is lost where another adds its own to the same weight."""
    model, x = nn.Linear(512, 512, bias=False), torch.ones(1, 512)

    def work() -> None:
        with autocast("cpu"):
            losses = [model(x).sum() for _ in range(3)]
        for loss in losses:
            loss.backward()

    with scope(model):
        for _ in range(10):
            model.zero_grad()
            in_threads(*[work] * THREADS)
            assert model.weight.grad.unique().tolist() == [3 * THREADS]


def test_memory_is_counted_while_weights_are_cast(in_threads: InThreads) -> None:
    """A thread that logs `nbytes()` ends with "dictionary changed size during iteration"."""
    model, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(32)]), torch.ones(1, 4)

    def forward() -> None:
        for layer in model:
            layer.weight = nn.Parameter(torch.ones(4, 4))
        with autocast("cpu"):
            model(x)

    with master_weights(model) as handle:
        in_threads(forward, handle.nbytes, handle.nbytes, seconds=2)


def test_parameters_are_registered_while_weights_are_looked_up(in_threads: InThreads) -> None:
    """A thread that builds a model ends another's forward pass with "dictionary changed size"."""
    model, x, known = nn.Linear(4, 4), torch.ones(1, 4), [nn.Parameter(torch.ones(4, 4)) for _ in range(500)]
    other = nn.Module()

    def forward() -> None:
        with autocast("cpu"):
            for weight in known:
                nn.functional.linear(x, weight)

    def build() -> None:
        for weight in known:
            other.weight = weight

    with cached_casts(model):
        in_threads(forward, build, build, seconds=2)


def test_histories_have_the_magnitudes_of_all_threads(in_threads: InThreads) -> None:
    """The scale of the next step is too small for what one of the threads has computed."""
    policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=4)})

    def work_with(model: nn.Module, size: float) -> Callable[[], None]:
        def work() -> None:
            with torch.no_grad(), autocast("cpu", policy=policy):
                model(torch.full((2, 8), size))

        return work

    for _ in range(60):
        model = nn.Linear(8, 8)
        with delayed_scales(model) as scales:
            in_threads(*[work_with(model, 2.0**i) for i in range(THREADS)])
        assert scales.state_dict()["weight"]["input"]["current"] == 2.0 ** (THREADS - 1)


@pytest.mark.parametrize("scope", [cached_casts, master_weights])
def test_scopes_come_and_go_while_others_infer_and_train(scope: Any, in_threads: InThreads) -> None:
    """Inference, training, a policy and scopes over two models disturb each other."""
    shared, trained, x = small(), small(), torch.linspace(-1, 1, 24).reshape(4, 6)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01, fused=True)
    with autocast("cpu"):
        expected = shared(x)

    def infer() -> None:
        with torch.no_grad(), autocast("cpu"):
            assert torch.equal(shared(x), expected)

    def train() -> None:
        with autocast("cpu"):
            loss = trained(x).float().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def come_and_go() -> None:
        with scope(small()) as handle, cached_casts(shared):
            infer()
            handle.nbytes()

    def rule() -> None:
        with autocast("cpu", policy=OpPolicy.default("cpu").override({"linear": "fp32"})):
            assert shared(x).dtype is torch.float32

    with cached_casts(shared), scope(trained):
        in_threads(infer, infer, train, come_and_go, rule, seconds=3)


def test_another_thread_is_importing_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scope raises "partially initialized module" while a thread takes the first step of an optimizer."""
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", ModuleType("torch.distributed.fsdp"))
    model, x = small(), torch.ones(4, 6)
    with cached_casts(model), autocast("cpu"):
        assert model(x).dtype is torch.bfloat16
    assert compare(lambda: model(x).sum(), "cpu")


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("scope", [cached_casts, master_weights])
def test_signal_handlers_may_use_the_model_while_it_is_cast(scope: Any) -> None:
    """A handler or finaliser that runs the model waits for ever for the thread that it has interrupted."""
    model, x, files = nn.Linear(4, 4), torch.ones(1, 4), (cache.__file__, accumulating.__file__)

    def forward() -> torch.Tensor:
        with autocast("cpu"):
            return model(x)

    def interrupted_at(number: int) -> bool:
        count = 0

        def tracer(frame: FrameType, event: str, _arg: object) -> Any:
            nonlocal count
            if frame.f_code.co_filename not in files:
                return None
            count += event == "line"
            if event == "line" and count == number:
                handled.append(forward())
            return tracer

        handled = list[torch.Tensor]()
        with torch.no_grad():
            model.weight.add_(1)
        sys.settrace(tracer)
        result = forward()
        sys.settrace(None)
        assert all(torch.equal(result, each) for each in handled)
        return bool(handled)

    def work() -> None:
        with scope(model):
            numbers.extend(itertools.takewhile(interrupted_at, itertools.count(1)))

    numbers = list[int]()
    thread = threading.Thread(target=work, daemon=True)  # a test that fails must end
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert len(numbers) > 20


def test_a_cast_that_a_step_has_outrun_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread casts a weight, another one steps, and then uses the cast from before its own step."""
    layer, x = nn.Linear(1, 1, bias=False).eval(), torch.ones(1, 1)
    nn.init.ones_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, fused=True)
    has_cast, has_stepped = threading.Event(), threading.Event()
    cast_alone = cache.cast_alone

    def slow(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        cast = cast_alone(weight, dtype)
        if threading.current_thread() is other:
            has_cast.set()
            has_stepped.wait(10)
        return cast

    def forward() -> float:
        with torch.no_grad(), autocast("cpu"):
            return layer(x).item()

    monkeypatch.setattr(cache, "cast_alone", slow)
    monkeypatch.setattr(bulk, "SMALL_ON_HOST", 2**22)
    other = threading.Thread(target=forward)
    with cached_casts(layer):
        other.start()
        has_cast.wait(10)
        layer.weight.grad = torch.full_like(layer.weight, -1)
        optimizer.step()
        has_stepped.set()
        other.join()
        assert forward() == 2
