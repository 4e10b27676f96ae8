"""Every object that threads share, hammered: each result is that of one thread.

On a free-threaded Python the threads run at once; elsewhere they are switched as often as Python can.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp_core
from amp_core import (
    AccumulationWindow,
    GradScaler,
    OpPolicy,
    Recipe,
    apply_policy,
    autocast,
    cached_casts,
    disable,
    guard,
    master_weights,
)
from amp_core.common.once import once
from amp_core.dispatch.activate import RuleOverrides
from amp_core.formats import E4M3, Quantization

from .drawn import TIMES, programs

InThreads = Callable[..., None]
DEFAULT = OpPolicy.default("cpu")
A, B = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), torch.eye(8)
THREADS = 4
SECONDS = 1.0 * TIMES


def make(seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(-1))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return model


def same(got: Any, expected: Any) -> bool:
    pairs = zip(got, expected, strict=True)
    return all(a.dtype is b.dtype and torch.equal(a, b) for a, b in pairs)


class Jobs:
    """A job and its variants: whatever the threads draw, the result is that of one thread alone."""

    def __init__(self, job: Callable[[int], list[Tensor]], variants: int) -> None:
        self._job = job
        self._expected = [job(i) for i in range(variants)]

    def __call__(self) -> None:
        i = random.randrange(len(self._expected))
        assert same(self._job(i), self._expected[i])
        assert not torch.is_autocast_enabled("cpu")


def policies() -> Jobs:
    """Regions with policies, disabled ones and decorators in them."""
    model = make()
    known = [
        None,
        OpPolicy.uniform("cpu"),
        DEFAULT.override({"mm": "fp32"}),
        DEFAULT.override({"softmax": "lower_precision_fp"}),
        DEFAULT.override({"linear": Recipe.mxfp8()}),
    ]
    exact, region = disable()(torch.mm), autocast("cpu", dtype=torch.float16)

    def job(i: int) -> list[Tensor]:
        with autocast("cpu", policy=known[i]):
            low = [model(A), A.mm(B), exact(A, B), A + B.bfloat16()]
            with region:
                return [*low, A.mm(B)]

    return Jobs(job, len(known))


def new_policies() -> Jobs:
    """Policies that no cache knows yet, around modules with rules of their own."""
    model = make()
    apply_policy(model, {"0": "fp32", "3": {"linear": "fp32"}, nn.Softmax: {"softmax": "lower_precision_fp"}})

    def job(i: int) -> list[Tensor]:
        rule = {"mm": ("fp32", "lower_precision_fp", "unchanged")[i]}
        with autocast("cpu", policy=DEFAULT.override(rule, origin=str(random.random()))):
            return [model(A), A.mm(B)]

    return Jobs(job, 3)


def scopes() -> Jobs:
    """Scopes over one model that come and go, and one over a model of the thread's own that trains."""
    shared = make()

    def job(i: int) -> list[Tensor]:
        own = make(i)
        with cached_casts(shared) as casts, autocast("cpu"), torch.no_grad():
            low = shared(A)
            casts.invalidate()
            casts.nbytes()
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1, fused=bool(i % 2))
        with master_weights(own) as handle:
            for _ in range(2):
                with autocast("cpu"):
                    loss = own(A).square().sum()
                loss.backward()
                optimizer.step()
                handle.nbytes()
        return [low, *own.parameters()]

    return Jobs(job, 4)


def scalers() -> Jobs:
    """Models that train with scalers of their own, some steps skipped."""

    def job(i: int) -> list[Tensor]:
        model, scaler = make(i), GradScaler("cpu", init_scale=2.0 ** (4 + i), growth_interval=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=bool(i % 2))
        for step in range(4):
            with autocast("cpu", dtype=torch.float16):
                loss = model(A).float().square().sum() * (torch.inf if step == i else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
            optimizer.zero_grad()
        return [*model.parameters(), torch.tensor(scaler.get_scale())]

    return Jobs(job, 4)


def kernels() -> Jobs:
    """The kernels of the CPU."""
    own, quantization = amp_core.get_backend("cpu").kernels(), Quantization(E4M3)

    def job(i: int) -> list[Tensor]:
        tensors = [A * (i + 1), B.clone(), torch.ones(3, 5), torch.full((1 << 16,), 1.5)]
        found = torch.zeros(())
        own.multiply_(tensors, torch.tensor(0.5), found)
        casts = own.cast(tensors, torch.bfloat16)
        own.add_(tensors, casts)
        stats, quantized = own.grad_stats(tensors), own.quantize(A * (i + 1), quantization)
        return [*tensors, *casts, found, stats.norm, stats.norms, quantized.values]

    return Jobs(job, 3)


def recordings() -> Jobs:
    """Recordings, while other threads record, too."""

    def job(i: int) -> list[Tensor]:
        with amp_core.record() as recording, autocast("cpu"):
            for _ in range(i + 1):
                A.mm(B)
        return [torch.tensor(sorted(recording.ops.values()))]

    return Jobs(job, 3)


def questions() -> Jobs:
    """Questions to the plugins."""

    def job(_: int) -> list[Tensor]:
        known = amp_core.backends()
        with pytest.raises(amp_core.BackendNotFoundError):
            amp_core.get_backend("no_such_device")
        return [torch.tensor([len(known), len(DEFAULT.explain("mm"))])]

    return Jobs(job, 1)


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("jobs", [policies, new_policies, scopes, scalers, kernels, recordings, questions])
def test_results_are_those_of_one_thread(jobs: Callable[[], Jobs], in_threads: InThreads) -> None:
    """Threads that share nothing but the process disturb each other."""
    in_threads(*[jobs()] * THREADS, seconds=SECONDS)


def test_all_at_once(in_threads: InThreads) -> None:
    """Threads that do different things disturb each other."""
    in_threads(
        *[make_jobs() for make_jobs in (policies, new_policies, scopes, scalers, kernels)], seconds=SECONDS
    )


def test_rules_of_modules_under_many_policies(in_threads: InThreads) -> None:
    """Threads that drop old policies damage the cache, which drops none from then on."""
    overrides = RuleOverrides("cpu", {"aten::mm": "fp32"}, "a test")
    known = [DEFAULT.override({"softmax": "fp32"}, origin=str(i)) for i in range(64)]

    def activate() -> None:
        for policy in random.sample(known, len(known)):
            overrides.activated(policy)

    activate()
    in_threads(*[activate] * THREADS, seconds=SECONDS)
    overrides.activated(DEFAULT)
    assert len(overrides._activations) <= 16
    assert overrides.activated(known[0]).policy == overrides.on(known[0])


def test_what_is_made_once_is_made_by_one_thread(in_threads: InThreads) -> None:
    """Two threads register a hook twice, and the histories of delayed scales move two steps at each one."""
    made: list[int] = []

    @once
    def hook(kind: str) -> object:
        made.append(threading.get_ident())
        time.sleep(0.01)
        return kind

    in_threads(*[lambda: hook("step")] * THREADS)
    assert len(made) == 1


@pytest.mark.parametrize("key", [None, "g"])
def test_threads_that_scale_the_first_losses(key: str | None, in_threads: InThreads) -> None:
    """A stage of a pipeline finds the counts of a scale that another one is making, and raises."""
    both_look = threading.Barrier(THREADS)

    class Slow(Tensor):
        """Its device is asked for when the scale has been found missing."""

        @property
        def device(self) -> torch.device:
            if scaler._scales.for_loss(key).scale is None:
                both_look.wait()
            return super().device

    scaler = GradScaler("cpu", 4.0)
    ones = [torch.ones(()).as_subclass(Slow) for _ in range(THREADS)]
    in_threads(*[lambda one=one: scaler.scale(one, key) for one in ones])
    assert scaler.get_scale(key) == 4.0


def trained(draw: random.Random, run: Callable[..., object]) -> list[Any]:
    """Train models by one scaler; `run` takes what each does in a step. Return all that is found."""
    torch.manual_seed(draw.randrange(2**30))
    models = [make(i) for i in range(THREADS)]
    kinds = draw.choices([{"fused": True}, {"foreach": True}, {"foreach": False}], k=THREADS)
    optimizers = [
        torch.optim.AdamW(each.parameters(), 0.01, **how) for each, how in zip(models, kinds, strict=True)
    ]
    scaler = GradScaler("cpu", 64.0, growth_interval=2, overlap=draw.random() < 0.5)
    keys = [None, *draw.choices([None, "a", "b"], k=THREADS - 1)]
    style, max_norm = draw.choice(["plain", "closure", "window"]), draw.choice([None, 0.1])
    found: list[Any] = []

    def job(i: int, factors: list[float]) -> None:
        optimizer, scope = optimizers[i], nullcontext
        window = AccumulationWindow(scaler, optimizer, key=keys[i])

        def backward() -> float:
            optimizer.zero_grad()
            for factor in factors:
                with scope():
                    scaler.scale(models[i](A).square().mean() * factor, keys[i]).backward()
            return 0.0

        if style == "closure":
            scaler.step_closure(optimizer, backward, key=keys[i], max_norm=max_norm)
            return
        if style == "window":
            scope = window.micro_batch
            with window:
                backward()
        else:
            backward()
        scaler.step(optimizer, key=keys[i], max_norm=max_norm)

    for _ in range(3):
        factors = [draw.choices([1.0, torch.inf], [9, 1], k=2) for _ in models]
        run(*[lambda i=i, own=own: job(i, own) for i, own in enumerate(factors)])
        records = [scaler.last_step[each] for each in optimizers]
        found += [(each.skipped, each.total_norm, each.bad_micro_batches) for each in records]
        scaler.update()
        found += [scaler.get_scale(key) for key in keys]
    return [*found, len(scaler.history), *[p.tolist() for each in models for p in each.parameters()]]


def test_one_scaler_steps_in_many_threads(in_threads: InThreads) -> None:
    """Flags, norms, records or scales of optimizers under one key, or under several, get mixed up."""

    def one_by_one(*jobs: Callable[[], object]) -> None:
        for job in jobs:
            job()

    for draw in programs(3.0, number="one scaler"):
        state = draw.getstate()
        expected = trained(draw, one_by_one)
        draw.setstate(state)
        assert str(trained(draw, in_threads)) == str(expected)


def test_windows_that_close_in_many_threads(in_threads: InThreads) -> None:
    """Threads note what their windows found at once: an overflow is lost, and the scale stays."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(THREADS)]
    optimizers = [torch.optim.SGD([each], 0.0) for each in weights]
    scaler = GradScaler("cpu", 4.0)
    windows = [AccumulationWindow(scaler, each) for each in optimizers]
    for step in range(int(200 * TIMES)):
        scaler.scale(torch.ones(()))
        for i, (window, weight) in enumerate(zip(windows, weights, strict=True)):
            window.__enter__()
            for value in (1.0, torch.inf if i == step % THREADS else 1.0):
                with window.micro_batch():
                    weight.grad = torch.full((1,), value)
        in_threads(*[lambda each=each: each.__exit__(None, None, None) for each in windows])
        for each in optimizers:
            scaler.step(each)
        scaler.update()
        assert scaler.get_scale() == 2.0
        scaler.update(4.0)


class Looking(TorchDispatchMode):
    """Lets Python run within each cast."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


RULED = (None, DEFAULT.override({"linear": "fp32"}), DEFAULT.override({"softmax": "lower_precision_fp"}))
SURROUNDINGS: tuple[Callable[[], Any], ...] = (nullcontext, Looking, amp_core.record)
SCOPES: tuple[Callable[[nn.Module], Any], ...] = (nullcontext, cached_casts, master_weights, guard)


def trained_in_surroundings(seed: int, shared: nn.Module) -> list[Any]:
    """Use a model that other threads use, and train one of the thread's own, in what the seed draws."""
    draw = random.Random(seed)
    own, found = make(seed), list[Any]()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    with draw.choice(SCOPES)(own):
        for _ in range(3):
            region = autocast("cpu", policy=draw.choice(RULED), cache_enabled=draw.random() < 0.8)
            with draw.choice(SURROUNDINGS)(), region:
                loss = own(A).float().square().sum()
                found += torch.autograd.grad(shared(A).float().square().sum(), [*shared.parameters()])
            with draw.choice(SURROUNDINGS)() if draw.random() < 0.3 else nullcontext():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [each.tolist() for each in (*found, *own.parameters())]


def test_drawn_programs_in_surroundings_of_their_own(in_threads: InThreads) -> None:
    """Modes, recordings, scopes and policies of a thread change another's numbers, or both wait for ever."""
    shared, hooks = make(), len(nn.modules.module._global_forward_hooks)
    for draw in programs(3.0, number="surroundings"):
        seeds = [draw.randrange(2**30) for _ in range(THREADS)]
        expected = [trained_in_surroundings(seed, shared) for seed in seeds]

        def job(i: int, seeds: list[int] = seeds, expected: list[Any] = expected) -> None:
            assert trained_in_surroundings(seeds[i], shared) == expected[i]

        in_threads(*[lambda i=i, job=job: job(i) for i in range(THREADS)])
    assert len(nn.modules.module._global_forward_hooks) == hooks
