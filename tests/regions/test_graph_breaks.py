"""Regions of compiled functions with graph breaks, held against the same functions uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor.utils import fresh_cache

import amp_core
from amp_core.dispatch.activate import pushed
from amp_core.kernels.scaled import ScaledProducts
from amp_core.plugin.default_manager import manager

X = torch.linspace(-1, 1, 16).reshape(4, 4)
EXACT = amp_core.OpPolicy.default("cpu").override({"mm": "fp32"})
Break = Callable[[torch.Tensor], Any]
Region = Callable[..., Any]

_opaque = torch.compiler.disable(lambda t: t.sum().item())
BREAKS: dict[str, Break] = {
    "print": lambda t: print("", end=""),  # noqa: T201
    "item": lambda t: t.sum().item(),
    "branch": lambda t: t.neg() if t.sum() > 0 else t,
    "call": lambda t: _opaque(t),
}


def with_policy(device: str, **settings: Any) -> amp_core.autocast:
    return amp_core.autocast(device, policy=EXACT if settings.get("enabled", True) else None, **settings)


def disabled(_device: str, **_settings: Any) -> amp_core.disable:
    return amp_core.disable()


REGIONS = {"region": amp_core.autocast, "policy": with_policy, "disable": disabled}


def plain(region: Region, broken: Break) -> Any:
    def function(x):
        with region("cpu"):
            y = x @ x
            broken(y)
            z = y @ y
        return y, z, x @ x

    return function


def nested(region: Region, broken: Break) -> Any:
    def function(x):
        with region("cpu"):
            y = x @ x
            with region("cpu", enabled=False):
                broken(x)
                z = x @ x
            with region("cpu", dtype=torch.float16) as inner:
                broken(y)
                w = x @ x
            with inner:
                v = x @ x
        return y, z, w, v, x @ x

    return function


def inlined(region: Region, broken: Break) -> Any:
    def inner(x):
        y = x @ x
        broken(y)
        return y, x @ x

    def own_region(x):
        with region("cpu", dtype=torch.float16):
            return inner(x)

    def function(x):
        with region("cpu"):
            return inner(x), own_region(x), x @ x

    return function


def method(region: Region, broken: Break) -> Any:
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.region = region("cpu")

        @region("cpu", dtype=torch.float16)
        def half(self, x):
            broken(x)
            return x @ x

        def forward(self, x):
            with self.region:
                y = x @ x
                broken(y)
                z = x @ x
            return y, z, self.half(x), x @ x

    return Model()


def passed_in(region: Region, broken: Break) -> Any:
    outside = region("cpu")

    def function(x, given=outside):
        with given:
            y = x @ x
            broken(y)
            z = x @ x
        return y, z, x @ x

    return function


def by_hand(region: Region, broken: Break) -> Any:
    def function(x):
        outer, inner = region("cpu"), region("cpu", dtype=torch.float16)
        outer.__enter__()
        inner.__enter__()
        y = x @ x
        inner.__exit__(None, None, None)
        broken(y)
        z = x @ x
        outer.__exit__(None, None, None)
        return y, z, x @ x

    return function


def raising(region: Region, broken: Break) -> Any:
    def function(x):
        try:
            with region("cpu"):
                y = x @ x
                broken(y)
                raise ValueError
        except ValueError:
            return y, x @ x

    return function


PROGRAMS = [plain, nested, inlined, method, passed_in, by_hand, raising]


def dtypes(outputs: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda t: t.dtype, outputs)


@pytest.mark.parametrize("broken", BREAKS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("kind", REGIONS)
def test_a_graph_break_keeps_the_region(kind: str, program: Any, broken: str) -> None:
    """A compiled function with a graph break in a region crashes, or computes in other dtypes than eager."""
    function = program(REGIONS[kind], BREAKS[broken])
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    expected = dtypes(function(X))
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager")
    assert [dtypes(compiled(X)) for _ in range(2)] == [expected] * 2
    assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), pushed()) == (*before, 0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", REGIONS)
def test_a_graph_break_with_real_compilers(kind: str, backend: str) -> None:
    """A backend that compiles for good loses the region or its policy at the break."""
    function = nested(REGIONS[kind], BREAKS["print"])
    torch._dynamo.reset()
    assert dtypes(torch.compile(function, backend=backend)(X)) == dtypes(function(X))


class Half(amp_core.autocast):
    """A subclass that overrides a method that Dynamo would not call."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        torch.set_autocast_dtype("cpu", torch.float16)
        return entered


class Heir(Half):
    """A subclass that inherits the override."""


@pytest.mark.parametrize("made", ["inside", "outside"])
@pytest.mark.parametrize("cls", [Half, Heir])
def test_what_subclasses_override_runs(cls: type[amp_core.autocast], made: str) -> None:
    """Compiled code crashes in the ``__enter__`` of a subclass, or enters the region without it."""
    outside = cls("cpu")

    def function(x: torch.Tensor) -> torch.Tensor:
        with outside if made == "outside" else cls("cpu"):
            return x @ x

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager")
    assert [compiled(X).dtype for _ in range(2)] == [torch.float16] * 2
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16


@pytest.mark.parametrize("program", [plain, inlined, passed_in], ids=lambda p: p.__name__)
def test_as_many_graphs_as_with_torch(program: Any) -> None:
    """A region costs graphs that torch's own would not."""
    frames = []
    for region in (torch.autocast, amp_core.autocast):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        torch.compile(program(region, BREAKS["print"]), backend=counter)(X)
        frames.append(counter.frame_count)
    assert frames[0] == frames[1]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_the_policy_around_a_compiled_function_counts(backend: str) -> None:
    """A compiled function keeps the policy of the regions around its first call."""

    def function(x):
        return x @ x

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend)
    uniform = amp_core.OpPolicy.default("cpu").override({"add.Tensor": "lower_precision_fp"})
    for policy in (None, EXACT, uniform, None, EXACT):
        with amp_core.autocast("cpu", policy=policy):
            assert compiled(X).dtype is function(X).dtype
    assert compiled(X).dtype is torch.float32


def test_the_policy_is_part_of_the_cache_key() -> None:
    """Code that was cached under one policy is loaded under another, also after torch._dynamo.reset()."""

    def function(x):
        return (x @ x).tan()

    exact = amp_core.OpPolicy.default("cpu").override({"matmul": "fp32"})
    hits = []
    with fresh_cache(), functorch_config.patch(enable_autograd_cache=True):
        for policy in (None, exact, None, exact):
            counters.clear()
            torch._dynamo.reset()
            with amp_core.autocast("cpu", policy=policy):
                assert torch.compile(function)(X).dtype is function(X).dtype
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 0, 1, 1]


def test_the_backend_is_part_of_the_cache_key() -> None:
    """After the upgrade of a plugin, products of its old version are loaded from the cache."""

    class Upgraded(ScaledProducts):
        def multiply(self, a: Any, b: Any, accumulate: torch.dtype) -> torch.Tensor:
            return 2 * super().multiply(a, b, accumulate)

    class OtherCpu(type(amp_core.get_backend("cpu"))):  # type: ignore[misc]
        def scaled_products(self) -> ScaledProducts:
            return Upgraded()

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).tan()

    recipe = amp_core.OpPolicy.default("cpu").override({"matmul": amp_core.Recipe.fp8_tensorwise()})
    with ExitStack() as served, fresh_cache(), functorch_config.patch(enable_autograd_cache=True):
        for _ in range(2):
            torch._dynamo.reset()
            with amp_core.autocast("cpu", policy=recipe):
                assert torch.allclose(torch.compile(function)(X).float(), function(X).float(), rtol=0.02)
            served.enter_context(manager().registry.serving(OtherCpu()))


@torch.library.custom_op("amp_graph_break_test::fail", mutates_args=())
def fail(x: torch.Tensor) -> torch.Tensor:
    raise PlannedError


class PlannedError(Exception):
    """What a compiled function raises at run time, inside a region."""


fail.register_fake(torch.empty_like)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", REGIONS)
def test_an_exception_in_compiled_code_keeps_the_outer_state(kind: str, backend: str) -> None:
    """A compiled function that raises in a region leaves that region's dtype, policy or depth in force."""

    def function(x):
        with REGIONS[kind]("cpu", dtype=torch.float16):
            return fail(x @ x)

    def state() -> tuple[object, ...]:
        depth = torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), pushed(), depth

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend)
    with amp_core.autocast("cpu", policy=EXACT):
        before = state()
        for _ in range(2):
            with pytest.raises(PlannedError):
                compiled(X)
            assert state() == before


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", [None, EXACT], ids=["torch's rules", "policy"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it
def test_the_region_of_a_backward_pass_between_graphs(
    policy: amp_core.OpPolicy | None, dtype: torch.dtype, backend: str
) -> None:
    """Dynamo compiles what enters the region, and fails, as torch runs that graph op by op."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x @ x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            with amp_core.autocast("cpu", dtype, policy=policy):
                return torch.mm(grad, x.t()).float() + torch.mm(x.t(), grad).float()

    def step(weight: torch.Tensor) -> None:
        Product.apply(weight).square().sum().backward()

    torch._dynamo.reset()
    one, other = (X.clone().requires_grad_() for _ in range(2))
    torch.compile(step, backend=backend)(one)
    step(other)
    assert torch.equal(one.grad, other.grad)


def test_the_graph_of_a_region_is_that_of_torch() -> None:
    """Torch's caches and exporters, which know torch's calls alone, refuse graphs with our regions."""
    targets = []
    for region in (torch.autocast, amp_core.autocast):

        def function(x, region=region):
            with region("cpu", dtype=torch.float16), region("cpu", enabled=False):
                return x @ x

        graphs: list[Any] = []

        def backend(graph: Any, _inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph

        torch._dynamo.reset()
        torch.compile(function, backend=backend, fullgraph=True)(X)
        targets.append([(node.op, node.target) for node in graphs[0].graph.nodes])
    assert targets[0] == targets[1]
