"""Features that meet on one op, in pairs and at random, held against casts written by hand.

A policy and rules for modules say which dtype an op runs in. Nothing else may change a result: not a scope
that keeps casts (of this model or another, opened outside the region, inside it or in another thread), not an
observer, not a comparison, not a checkpoint, not TorchScript.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchRuntimeError
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import OpPolicy, apply_policy, autocast, cached_casts, master_weights
from amp_core.dispatch.activate import pushed
from amp_core.dispatch.engine import engine

from ..drawn import programs

LOW, HIGH = torch.bfloat16, torch.float32
CPU = OpPolicy.default("cpu")
BY_DEFAULT = {"linear": "lower_precision_fp"}
POLICIES: dict[str, dict[str, str]] = {
    "none": {},
    "linear fp32": {"linear": "fp32"},
    "softmax low": {"softmax": "lower_precision_fp"},
    "layer_norm low": {"layer_norm": "lower_precision_fp"},
    "linear fp32, layer_norm low": {"linear": "fp32", "layer_norm": "lower_precision_fp"},
}
HEADS: dict[str, dict[str, str] | str | None] = {
    "none": None,
    "head linear fp32": {"linear": "fp32"},
    "head softmax fp32": {"softmax": "fp32"},
    "head fp32": "fp32",
}
SCOPES: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "none": lambda _: nullcontext(),
    "cached_casts": cached_casts,
    "persistent": lambda model: _removed(cached_casts(model, persistent=True)),
    "master_weights": master_weights,
}
OBSERVERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "record": amp_core.record,
}
THREADS = ("none", "policy", "same model", "other model", "persistent removed")


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.out(x), -1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), Head()

    def body(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x))

    def forward(self, x: Tensor, recompute_in: AbstractContextManager[Any] | None = None) -> Tensor:
        if recompute_in is None:
            return self.head(self.body(x))
        contexts = (
            nullcontext(),
            recompute_in,
        )  # torch restores the dtype by itself, a policy it does not know
        return self.head(checkpoint(self.body, x, use_reentrant=False, context_fn=lambda: contexts))


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


def layers(x, w1, b1, scale, shift, w2, b2):  # type: ignore[no-untyped-def]
    """What `Net` computes, in a region of its own that takes the policy around it."""
    with autocast("cpu", dtype=torch.bfloat16):
        x = nn.functional.linear(x, w1, b1)
        x = nn.functional.layer_norm(x, [6], scale, shift)
        return torch.softmax(nn.functional.linear(x, w2, b2), -1)


scripted_layers = amp_core.script(layers)


def by_hand(net: Net, policy: str, head: str) -> Tensor:
    """Return what `net` gives in a bfloat16 region, each cast written out."""
    rules = {**BY_DEFAULT, **POLICIES[policy]}
    whole = HEADS[head] == "fp32"
    own = HEADS[head] if isinstance(HEADS[head], dict) else {}
    head_rules = {} if whole else {**rules, **own}
    inner, norm, out = net.inner, net.norm, net.head.out
    x = op(rules, "linear", nn.functional.linear, X, inner.weight, inner.bias)
    x = op(
        rules,
        "layer_norm",
        lambda x, w, b: nn.functional.layer_norm(x, (6,), w, b),
        x,
        norm.weight,
        norm.bias,
    )
    x = op(head_rules, "linear", nn.functional.linear, x.float() if whole else x, out.weight, out.bias)
    return op(head_rules, "softmax", lambda x: torch.softmax(x, -1), x)


def op(rules: dict[str, str], name: str, function: Callable[..., Tensor], *given: Tensor) -> Tensor:
    dtype = {"lower_precision_fp": LOW, "fp32": HIGH}.get(rules.get(name, "unchanged"))
    return function(*(given if dtype is None else [t.to(dtype) for t in given]))


def expected(policy: str, head: str) -> list[Tensor | None]:
    net = Net()
    try:
        out = by_hand(net, policy, head)
    except RuntimeError:  # dtypes that do not go together
        return []
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad for p in net.parameters())]


EXPECTED = {key: expected(*key) for key in itertools.product(POLICIES, HEADS)}


def run(
    policy: str = "none",
    head: str = "none",
    scope: str = "none",
    inside: bool = False,
    observer: str = "none",
    again: bool = False,
    thread: str = "none",
    compiled: bool = False,
    scripted: bool = False,
    compared: bool = False,
    steps: int = 2,
) -> None:
    """Run one step of a model `steps` times in the features named, and compare with `by_hand`."""
    net = Net()
    if compiled:
        torch._dynamo.reset()
        again = False  # Dynamo does not trace the contexts of a checkpoint
    call = torch.compile(net, backend="eager") if compiled else net
    if scripted:
        head, again = "none", False  # functions have neither modules nor a checkpoint

        def call(x: Tensor) -> Tensor:
            return scripted_layers(x, *net.parameters())

    with ExitStack() as around:
        if HEADS[head] is not None:
            around.enter_context(apply_policy(net, {"head": HEADS[head]}))
        if not inside:
            around.enter_context(SCOPES[scope](net))
        for _ in range(steps):
            net.zero_grad()
            with (
                OBSERVERS[observer](),
                autocast("cpu", dtype=LOW, policy=_policy(policy)),
                SCOPES[scope](net) if inside else nullcontext(),
                beside(thread, net),
            ):
                if compared:
                    compare_step(call, net, policy, head)
                got = attempt(call, autocast("cpu", dtype=LOW, policy=_policy(policy)) if again else None)
            wanted = EXPECTED[policy, head]
            assert (got is None) == (not wanted)
            if got is not None:
                got.float().square().sum().backward()
                check([got.detach(), *(p.grad for p in net.parameters())], wanted)


def compare_step(call: Callable[..., Tensor], net: Net, policy: str, head: str) -> None:
    """Compare the forward pass; its run in low precision must give what the step gives."""
    outputs = []

    def step() -> Tensor:
        outputs.append(call(X))
        return outputs[-1].float().square().sum()

    wanted = EXPECTED[policy, head]
    try:
        amp_core.compare(step, "cpu", policy=_policy(policy), dtype=LOW, model=net)
    except (RuntimeError, TorchRuntimeError):
        if wanted:
            raise
        return
    assert any(torch.equal(out, wanted[0]) and out.dtype is wanted[0].dtype for out in outputs)


def _policy(name: str) -> OpPolicy | None:
    return CPU.override(POLICIES[name]) if POLICIES[name] else None


def attempt(call: Callable[..., Tensor], recompute_in: AbstractContextManager[Any] | None) -> Tensor | None:
    """Return the output, or None where dtypes do not go together."""
    try:
        return call(X) if recompute_in is None else call(X, recompute_in)
    except (RuntimeError, TorchRuntimeError) as error:
        if "type" in str(error):
            return None
        raise


def check(got: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.dtype is theirs.dtype
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@contextmanager
def beside(what: str, net: Net) -> Iterator[None]:
    """While the block runs, another thread is inside something else."""
    if what == "none":
        yield
        return
    ready, done = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            _in_thread(what, net, ready, done)
        except BaseException as error:  # raised again in the main thread
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(60)
    try:
        yield
    finally:
        done.set()
        thread.join()
    if failures:
        raise failures[0]


def _in_thread(what: str, net: Net, ready: threading.Event, done: threading.Event) -> None:
    other = Net() if what != "same model" else net
    if what == "persistent removed":
        handle = cached_casts(other, persistent=True)
        with autocast("cpu", policy=CPU.override({"linear": "fp32"})), torch.no_grad():
            assert other(X).dtype is HIGH
        handle.remove()
        ready.set()
        done.wait(60)
        return
    policy = CPU.override({"linear": "fp32", "softmax": "lower_precision_fp"}) if what == "policy" else None
    with (
        cached_casts(other) if policy is None else nullcontext(),
        autocast("cpu", policy=policy),
        torch.no_grad(),
    ):
        out = other(X)
        ready.set()
        done.wait(60)
        assert torch.equal(out, other(X))


FEATURES: dict[str, list[dict[str, Any]]] = {
    "policy": [{"policy": name} for name in POLICIES if name != "none"],
    "module policy": [{"head": name} for name in HEADS if name != "none"],
    "scope": [{"scope": name, "inside": i} for name in SCOPES if name != "none" for i in (False, True)],
    "observer": [{"observer": "record"}],
    "checkpoint": [{"again": True}],
    "thread": [{"thread": name} for name in THREADS if name != "none"],
    "compile": [{"compiled": True}],
    "script": [{"scripted": True}],
    "compare": [{"compared": True}],
}


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert not any(engine("cpu")._users.values())
    assert pushed() == 0


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations_with_replacement(FEATURES, 2)))
def test_pairs(one: str, other: str) -> None:
    """Two features that meet on an op give what neither gives alone."""
    for first, second in itertools.product(FEATURES[one], FEATURES[other]):
        run(**{**first, **second})


def test_random_programs() -> None:
    """Three features or more give what no pair of them gives."""
    for chance in programs(10.0):
        program: dict[str, Any] = {}
        for settings in FEATURES.values():
            if chance.random() < 0.6:
                program |= chance.choice(settings)
        try:
            run(**program)
        except BaseException:
            print(f"program: {program}")  # noqa: T201 - pytest shows it
            raise
