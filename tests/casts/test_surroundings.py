"""`cached_casts` and `master_weights` under transforms, tracers, threads, and before a model has memory."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_core import OpPolicy, autocast, cached_casts, master_weights
from amp_core._torch import cast_cache

X = torch.linspace(-1, 1, 24).reshape(4, 6)
SCOPES = pytest.mark.parametrize("scope", [cached_casts, master_weights])
Scope = Callable[[nn.Module], Any]


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def plain(_model: nn.Module) -> Any:
    return nullcontext()


def low(model: nn.Module, *args: Any) -> Any:
    with autocast("cpu"):
        return model(*args)


def vmapped(model: nn.Module) -> Tensor:
    return low(torch.vmap(model), X)


def vmapped_over_weights(model: nn.Module) -> Tensor:
    stacked = {name: torch.stack([p, p * 0.5]) for name, p in model.named_parameters()}
    return low(torch.vmap(lambda p: torch.func.functional_call(model, p, (X,))), stacked)


def gradient_of_input(model: nn.Module) -> Tensor:
    loss = torch.func.grad(lambda x: model(x).float().square().sum())
    return torch.stack([low(loss, X), low(loss, X)])


def tangent(model: nn.Module) -> Tensor:
    return low(lambda x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1], X)


def forward_mode(model: nn.Module) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        return torch.autograd.forward_ad.unpack_dual(low(model, dual)).tangent


def jagged(model: nn.Module) -> Tensor:
    nested = torch.nested.nested_tensor([X[:1], X[1:]], layout=torch.jagged)
    return low(model, nested).values()


@SCOPES
@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch's own forward mode
@pytest.mark.parametrize(
    "compute", [vmapped, vmapped_over_weights, gradient_of_input, tangent, forward_mode, jagged]
)
@pytest.mark.parametrize("policy", [False, True])
def test_transforms(compute: Callable[[nn.Module], Tensor], policy: bool, scope: Scope) -> None:
    """A cast of one level of a transform meets tensors of another: an error, or another dtype."""
    rules = OpPolicy.default("cpu").override({"tanh": "lower_precision_fp"}) if policy else None
    model = make()
    with autocast("cpu", policy=rules):
        expected = compute(model)
    with scope(model), autocast("cpu", policy=rules):
        low(model, X)  # there are casts to take
        got, again = compute(model), compute(model)
    assert got.dtype is expected.dtype
    assert torch.equal(got, expected)
    assert torch.equal(again, expected)


class Inside(nn.Module):
    """A model with its region, as tracers want it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", cache_enabled=False):
            return self.model(x)


@SCOPES
@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize(
    "trace",
    [lambda f: torch.jit.trace(f, (X,)), lambda f: torch.fx.experimental.proxy_tensor.make_fx(f)(X)],
    ids=["jit", "make_fx"],
)
def test_a_graph_holds_no_cast(trace: Any, scope: Scope) -> None:
    """A traced model goes on with the weights of the day it was traced."""
    model = make().requires_grad_(False)
    inside = Inside(model)
    with scope(model):
        inside(X)
        traced = trace(inside)
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    assert torch.equal(traced(X), inside(X))


@SCOPES
def test_a_model_on_the_meta_device(scope: Scope) -> None:
    """A scope over a model that gets its memory later fails, or never caches a cast."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    with scope(model) as handle:
        with torch.autocast("cpu"):
            assert model(X.to("meta")).device.type == "meta"
        model.to_empty(device="cpu")
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(0.1)
        assert low(model, X).dtype is torch.bfloat16
        assert handle.nbytes() > 0


@SCOPES
def test_fake_tensors_leave_no_fake_casts(scope: Scope) -> None:
    """A forward pass that only asks for shapes fails, or later ones compute with its fake casts."""
    model = make()
    expected = low(model, X)
    with scope(model), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert low(model, mode.from_tensor(X)).dtype is torch.bfloat16
    with scope(model):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            low(model, mode.from_tensor(X))
        assert torch.equal(low(model, X), expected)


class Tagged(Tensor):
    """A subclass with nothing of its own."""


@SCOPES
@pytest.mark.filterwarnings("ignore:.*are cast at each use")
def test_a_subclass_as_weight(scope: Scope) -> None:
    """Its ops see another type of weight in the scope than in a plain region."""
    model = make()
    model[0].weight = nn.Parameter(torch.randn(5, 6).as_subclass(Tagged))
    expected = low(model, X)
    with scope(model):
        got = low(model, X)
    assert type(got) is type(expected)
    assert got.dtype is expected.dtype
    assert torch.equal(got, expected)


class Threads:
    """Inference, training, scopes that come and go, and a policy, over two models."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.shared, self.trained = make(), make()
        self.expected = low(self.shared, X)
        self.optimizer = torch.optim.SGD(self.trained.parameters(), lr=0.01, fused=True)
        self.failures: list[BaseException] = []

    def infer(self) -> None:
        with torch.no_grad():
            assert torch.equal(low(self.shared, X), self.expected)

    def train(self) -> None:
        low(self.trained, X).float().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def come_and_go(self) -> None:
        with self.scope(make()) as handle, cached_casts(self.shared):
            self.infer()
            handle.nbytes()

    def rule(self) -> None:
        with autocast("cpu", policy=OpPolicy.default("cpu").override({"linear": "fp32"})):
            assert self.shared(X).dtype is torch.float32

    def repeat(self, work: Callable[[], None], until: float) -> None:
        try:
            while time.monotonic() < until and not self.failures:
                work()
        except BaseException as error:  # shown by the main thread
            self.failures.append(error)


@SCOPES
def test_threads(scope: Scope) -> None:
    """Inference, training and scopes that come and go disturb each other."""
    work = Threads(scope)
    until = time.monotonic() + 3
    with cached_casts(work.shared), scope(work.trained):
        jobs = (work.infer, work.infer, work.train, work.come_and_go, work.rule)
        threads = [threading.Thread(target=work.repeat, args=(job, until)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if work.failures:
        raise work.failures[0]


THREADS_UNDER_A_MODE = """
import faulthandler, sys, threading
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from amp_core import autocast, cached_casts, record

faulthandler.dump_traceback_later(60, exit=True)  # a hang holds the interpreter's lock


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def work():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    with Looking():
        for _ in range(4):
            with autocast("cpu"):
                model(torch.ones(2, 4))


sys.setswitchinterval(1e-4)
with cached_casts(nn.Linear(4, 4)), record():
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
"""


THREADS_THAT_LEAVE_TORCHS_REGIONS = """
import faulthandler, sys, threading
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from amp_core import autocast, cached_casts

faulthandler.dump_traceback_later(60, exit=True)  # a hang holds the interpreter's lock
weight, x, over = nn.Parameter(torch.ones(4, 4)), torch.ones(2, 4), threading.Event()


def watched():
    for _ in range(30):
        with FlopCounterMode(display=False), autocast("cpu"):
            assert (x @ weight).dtype is torch.bfloat16
    over.set()


def plain():
    while not over.is_set():
        with torch.autocast("cpu"):
            assert (x @ weight).dtype is torch.bfloat16


sys.setswitchinterval(1e-4)
with cached_casts(nn.Linear(4, 4)):
    threads = [threading.Thread(target=each) for each in (plain, plain, watched)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_regions_take_no_lock_where_none_is_needed() -> None:
    """Each region pays for threads that call torch's kernels from Python, though there is no such kernel."""
    code = (
        "import torch\ntorchs = torch.clear_autocast_cache\n"
        "import amp_core\nfrom amp_core._torch import cast_cache\n"
        "with amp_core.autocast('cpu'): torch.ones(2, 2) @ torch.ones(2, 2)\n"
        "assert cast_cache.clear is torch.clear_autocast_cache is torchs\n"
        "with amp_core.record(), amp_core.autocast('cpu'): torch.ones(2, 2) @ torch.ones(2, 2)\n"
        "assert cast_cache.clear is torch.clear_autocast_cache is not torchs\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_threads_under_a_mode() -> None:
    """Two threads wait for torch's cache of casts and for the interpreter, each for what the other has."""
    subprocess.run([sys.executable, "-c", THREADS_UNDER_A_MODE], check=True, timeout=120)


def test_threads_that_leave_torchs_regions() -> None:
    """A region of torch's that frees casts, and a thread that wants one, wait for each other."""
    subprocess.run([sys.executable, "-c", THREADS_THAT_LEAVE_TORCHS_REGIONS], check=True, timeout=120)


def test_torchs_function_stays_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code that clears the cache breaks at a lock, once a scope has been used."""

    def clear(a: torch.Tensor) -> torch.Tensor:
        torch.clear_autocast_cache()
        return a + 1

    def in_one_graph() -> torch.Tensor:
        torch._dynamo.reset()
        return torch.compile(clear, backend="eager", fullgraph=True)(torch.ones(2))  # type: ignore[no-any-return]

    with cached_casts(nn.Linear(2, 2)), autocast("cpu"):
        nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
    with monkeypatch.context() as patched:
        patched.setattr(torch, "clear_autocast_cache", cast_cache._torchs_clear)
        try:
            in_one_graph()
        except torch._dynamo.exc.TorchDynamoException:
            pytest.skip("Dynamo of this torch cannot trace torch.clear_autocast_cache, amp-core or not")
    assert in_one_graph().sum() == 4
