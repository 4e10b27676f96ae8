"""Rules that are recipes or of functions, in random programs of the features that can surround them.

What a region gives is held against programs written by hand elsewhere (``tests/policy``). Here, whatever else
is around that region must leave its bits alone: scopes, plans, observers, checkpoints, threads, exceptions,
graphs.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import OpPolicy, PrecisionPlan, Recipe, autocast, cached_casts, delayed_scales
from amp_core.dispatch.activate import pushed
from amp_core.dispatch.engine import engine

from ..drawn import programs

pytestmark = [
    pytest.mark.filterwarnings("ignore::amp_core.EmulationWarning"),
    # After a graph break, Dynamo reads `.grad` of what it resumes with, in programs without amp-core too.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    # Dynamo instantiates the class.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

LOW = torch.bfloat16
CPU = OpPolicy.default("cpu")
RULES: dict[str, Any] = {
    "low": "lower_precision_fp",
    "fp32": "fp32",
    "fp8": Recipe.fp8_tensorwise(),
    "mxfp8": Recipe.mxfp8(),
    "nvfp4": Recipe.nvfp4(),
    "delayed": Recipe.fp8_delayed(history=2),
}
FUNCTION_RULES = ("unchanged", "fp32", "lower_precision_fp", "low_in_fp32_out")
HEADS: dict[str, Any] = {"none": None, "fp32": "fp32", "fp8": {"linear": Recipe.fp8_tensorwise()}}


class Gated(torch.autograd.Function):
    """A product with a hand-written gradient, as other packages have them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return x * torch.sigmoid(gate).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        half = torch.sigmoid(gate)
        return (grad * half).to(x.dtype), (grad * x * half * (1 - half)).sum((0,)).to(gate.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.gate = nn.Parameter(torch.randn(8))

    def body(self, x: Tensor) -> Tensor:
        return self.norm(Gated.apply(self.inner(x), self.gate))

    def forward(self, x: Tensor, recompute_in: AbstractContextManager[Any] | None = None) -> Tensor:
        if recompute_in is None:
            return self.head(self.body(x))
        contexts = nullcontext(), recompute_in
        return self.head(checkpoint(self.body, x, use_reentrant=False, context_fn=lambda: contexts))


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
CHOICES: dict[str, tuple[Any, ...]] = {
    "linear": tuple(RULES),
    "function": FUNCTION_RULES,
    "head": tuple(HEADS),
    "scope": ("none", "cached_casts", "persistent", "master_weights"),
    "inside": (False, True),
    "plan": (False, True),
    "observer": ("none", "record", "guard", "watch"),
    "checkpoint": (False, True),
    "thread": ("none", "other", "same"),
    "interrupted": (False, True),
    "within": ("nothing", "region", "disable"),
    "compiled": (False, False, False, True),
    "grad": (True, True, False),
}
"""What a program is made of. The first choice of each is to leave the feature out."""


class PlannedError(Exception):
    """What a module raises in the middle of a pass."""


def policy_of(program: dict[str, Any]) -> OpPolicy:
    function = {f"{__name__}:Gated": program["function"]}
    return CPU.override({"linear": RULES[program["linear"]], **function})


def step(program: dict[str, Any], around: ExitStack, net: Net) -> list[list[Tensor]]:
    """Run `net` twice as the program says, and return the results of each pass."""
    policy, head = policy_of(program), HEADS[program["head"]]
    if program["plan"]:
        around.enter_context(PrecisionPlan(policy, {} if head is None else {"head": head}).apply(net))
    elif head is not None:
        around.enter_context(amp_core.apply_policy(net, {"head": head}))
    if program["linear"] == "delayed":
        around.enter_context(delayed_scales(net))
    call: Callable[..., Tensor] = torch.compile(net, backend="aot_eager") if program["compiled"] else net
    with nullcontext() if program["inside"] else scope_of(program, net):
        return [one_pass(program, policy, net, call) for _ in range(2)]


def one_pass(
    program: dict[str, Any], policy: OpPolicy, net: Net, call: Callable[..., Tensor]
) -> list[Tensor]:
    net.zero_grad()
    region = autocast("cpu", dtype=LOW, policy=policy)
    with ExitStack() as around:
        around.enter_context(observer_of(program, net))
        if program["inside"]:
            around.enter_context(scope_of(program, net))
        with outer_of(program), torch.set_grad_enabled(program["grad"]):  # left before the backward
            if program["interrupted"]:
                interrupt(net, region)
            with region, beside(program, net):
                again = program["checkpoint"] and not program["compiled"]
                out = call(X, region) if again else call(X)
        if program["grad"]:
            out.float().square().sum().backward()
    return [out.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


def interrupt(net: Net, region: autocast) -> None:
    def fail(*_: Any) -> None:
        raise PlannedError

    handle = net.norm.register_forward_pre_hook(fail)
    with pytest.raises(PlannedError), region:
        net(X)
    handle.remove()


def scope_of(program: dict[str, Any], net: nn.Module) -> AbstractContextManager[Any]:
    kind = program["scope"]
    if kind == "none":
        return nullcontext()
    return persistent(net) if kind == "persistent" else getattr(amp_core, kind)(net)


@contextmanager
def persistent(net: nn.Module) -> Iterator[None]:
    handle = cached_casts(net, persistent=True)
    try:
        yield
    finally:
        handle.remove()


def observer_of(program: dict[str, Any], net: nn.Module) -> AbstractContextManager[Any]:
    kind = program["observer"]
    return {
        "none": nullcontext,
        "record": amp_core.record,
        "guard": lambda: amp_core.guard(net),
        "watch": lambda: amp_core.watch(net),
    }[kind]()


def outer_of(program: dict[str, Any]) -> AbstractContextManager[Any]:
    kind = program["within"]
    if kind == "disable":
        return amp_core.disable()
    other = CPU.override({"layer_norm": "lower_precision_fp", "linear": Recipe.mxfp4()})
    return autocast("cpu", dtype=torch.float16, policy=other) if kind == "region" else nullcontext()


@contextmanager
def beside(program: dict[str, Any], net: Net) -> Iterator[None]:
    """While the block runs, another thread runs a model under other rules."""
    if program["thread"] == "none":
        yield
        return
    failures: list[BaseException] = []
    done = threading.Event()
    with torch.random.fork_rng(devices=()):  # the rounding of the program's gradients draws from it
        other = net if program["thread"] == "same" else Net()
    policy = CPU.override({"linear": Recipe.mxfp6(), f"{__name__}:Gated": "fp32"})

    def work() -> None:
        try:
            seen: list[Tensor] = []
            while not seen or not done.is_set():
                with torch.no_grad(), autocast("cpu", dtype=torch.float16, policy=policy):
                    seen.append(other.inner(X))
                assert torch.equal(seen[0], seen[-1])
        except BaseException as error:  # raised again in the main thread
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if failures:
        raise failures[0]


PLAIN = {name: choices[0] for name, choices in CHOICES.items()}
REFERENCES: dict[tuple[Any, ...], list[list[Tensor]]] = {}


def reference(program: dict[str, Any]) -> list[list[Tensor]]:
    """Return what the same rules give in a region that nothing surrounds."""
    key = tuple(program[name] for name in ("linear", "function", "head", "grad"))
    if key not in REFERENCES:
        plain = PLAIN | dict(zip(("linear", "function", "head", "grad"), key, strict=True))
        with ExitStack() as around:
            REFERENCES[key] = step(plain, around, Net())
    return REFERENCES[key]


def check(program: dict[str, Any]) -> None:
    if program["compiled"]:
        torch._dynamo.reset()
    wanted = reference(program)
    with ExitStack() as around:
        got = step(program, around, Net())
    for mine, theirs in zip(got, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one.dtype is other.dtype
            assert torch.equal(one, other)
    assert pushed() == 0
    assert not any(engine("cpu")._users.values())
    assert not torch.is_autocast_enabled("cpu")


def random_program(choose: random.Random) -> dict[str, Any]:
    program = {name: choose.choice(choices) for name, choices in CHOICES.items()}
    for name in choose.sample(list(CHOICES), choose.randint(0, len(CHOICES) - 2)):
        program[name] = PLAIN[name]
    if program["linear"] in ("delayed", "nvfp4"):  # graphs keep no histories, and draw other random numbers
        program["compiled"] = False
    return program


def test_random_programs() -> None:
    """What surrounds a region changes what a recipe or a rule of a function gives in it."""
    for choose in programs(most=12):
        program = random_program(choose)
        try:
            check(program)
        except BaseException:
            print(f"program: { {k: v for k, v in program.items() if v != PLAIN[k]} }")  # noqa: T201 - pytest shows it
            raise


def test_materialized_models() -> None:
    """A graph written for a policy with a rule of a function gives other bits than the region."""
    net = Net().eval()
    for rule in FUNCTION_RULES:
        policy = policy_of(PLAIN | {"function": rule})
        graph = amp_core.materialize(net, (X,), policy=policy, dtype=LOW)
        with torch.no_grad(), autocast("cpu", dtype=LOW, policy=policy):
            assert torch.equal(graph(X), net(X))
