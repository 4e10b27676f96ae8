"""Regions under torch.compile, torch.export, TorchScript and torch.jit.trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import amp_core

X = torch.ones(3, 3)
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")


def inside(a: torch.Tensor) -> torch.Tensor:
    with amp_core.autocast("cpu", dtype=torch.bfloat16):
        return torch.mm(a, a)


def partly_off(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with amp_core.autocast("cpu"):
        with amp_core.autocast("cpu", enabled=False):
            exact = torch.mm(a, a)
        return exact, torch.mm(a, a)


made_before = amp_core.autocast("cpu", dtype=torch.float16)


def with_instance(a: torch.Tensor) -> torch.Tensor:
    with made_before:
        return torch.mm(a, a)


decorated = amp_core.autocast("cpu")(torch.mm)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [inside, partly_off, with_instance, lambda a: decorated(a, a)])
def test_compile_in_one_graph(backend: str, function: Any) -> None:
    """A region breaks the graph, or compiles to other dtypes than eager's."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    dtypes = torch.utils._pytree.tree_map(lambda t: t.dtype, compiled(X))
    assert dtypes == torch.utils._pytree.tree_map(lambda t: t.dtype, function(X))


def products(a: torch.Tensor) -> Iterator[torch.Tensor]:
    for _ in range(2):
        yield torch.mm(a, a)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "region", [amp_core.autocast("cpu", torch.float16), amp_core.disable()], ids=["float16", "disable"]
)
def test_decorated_generators_compile_in_one_graph(region: Any, inside: bool) -> None:
    """The body of a compiled generator runs without its region, or fullgraph=True refuses it."""
    outside = region(products)

    def function(a: torch.Tensor) -> list[torch.dtype]:
        with amp_core.autocast("cpu"):
            generator = (region(products) if inside else outside)(a)
            return [t.dtype for product in generator for t in (product, torch.mm(a, a))]

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert compiled(X) == function(X)


@pytest.mark.parametrize("end", ["close", "throw"])
def test_a_compiled_decorated_generator_ends_its_body(end: str) -> None:
    """What the body does in ``finally`` is left out in silence, where a compiled function ends it early."""

    def function(a: torch.Tensor) -> list[torch.Tensor]:
        results = []

        @amp_core.autocast("cpu")
        def body() -> Iterator[torch.Tensor]:
            try:
                yield torch.mm(a, a)
            finally:
                results.append(torch.mm(a, a))

        generator: Any = body()
        results += [next(generator), torch.mm(a, a)]
        if end == "close":
            generator.close()
        else:
            try:
                generator.throw(ValueError("stop"))
            except ValueError:
                results.append(torch.mm(a, a) + 1)
        return results

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(X)
    assert [each.dtype for each in compiled] == [each.dtype for each in function(X)]


def test_compile_again_only_for_another_state() -> None:
    """A compiled region is compiled anew at every call."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(inside, backend=backend, fullgraph=True)
    for _ in range(3):
        compiled(X)
    assert len(graphs) == 1
    assert any(node.target is torch.amp._enter_autocast for node in graphs[0].graph.nodes)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("function", [inside, partly_off])
def test_export_keeps_the_region(strict: bool, function: Any) -> None:
    """An exported program silently computes in float32."""

    class Model(torch.nn.Module):
        def forward(self, a: torch.Tensor) -> Any:
            return function(a)

    program = torch.export.export(Model(), (X,), strict=strict)
    regions = [n for n in program.graph.nodes if n.target is torch.ops.higher_order.wrap_with_autocast]
    assert regions
    dtypes = torch.utils._pytree.tree_map(lambda t: t.dtype, program.module()(X))
    assert dtypes == torch.utils._pytree.tree_map(lambda t: t.dtype, function(X))


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_keeps_disable(strict: bool) -> None:
    """What must run in float32 runs in low precision, where the program is called inside a region."""

    class Model(torch.nn.Module):
        def forward(self, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with amp_core.disable():
                exact = torch.mm(a, a)
            return exact, torch.mm(a, a)

    program = torch.export.export(Model(), (X,), strict=strict).module()
    with amp_core.autocast("cpu"):
        exact, other = program(X)
    assert (exact.dtype, other.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("strict", [True, False])
def test_exported_region_keeps_its_dtype(strict: bool) -> None:
    """The default dtype of the process that runs an exported program changes what it computes."""

    class Model(torch.nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            with amp_core.autocast("cpu"):
                return torch.mm(a, a)

    program = torch.export.export(Model(), (X,), strict=strict).module()
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        assert program(X).dtype is torch.bfloat16
    finally:
        torch.set_autocast_dtype("cpu", torch.bfloat16)


def test_scripted_function() -> None:
    """torch.jit.script does not give the region its autocast pass."""
    assert torch.jit.script(inside)(X).dtype is torch.bfloat16


def test_scripting_a_decorated_function_is_refused_as_in_torch() -> None:
    """A decorator on a scripted function is ignored."""
    for cls in (torch.autocast, amp_core.autocast):
        with pytest.raises(RuntimeError, match="decorator is not supported in script mode"):
            torch.jit.script(cls("cpu")(torch.nn.functional.relu))


def test_traced_function() -> None:
    """torch.jit.trace records float32 ops."""
    for function in (inside, with_instance):
        traced = torch.jit.trace(function, (X,), check_trace=False)
        assert traced(X).dtype is function(X).dtype


def test_make_fx_records_the_casts() -> None:
    """make_fx of a region loses the casts."""
    graph = torch.fx.experimental.proxy_tensor.make_fx(inside)(X)
    assert graph(X).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_other_threads_go_on_while_one_exports(in_threads: Any) -> None:
    """A server that exports a model in one thread gets "torch.export cannot keep" in all others."""
    policy = amp_core.OpPolicy.default("cpu").override({"mm": "fp32"})
    found: list[torch.dtype] = []

    def serve() -> None:
        with amp_core.autocast("cpu", policy=policy):
            found.append(torch.mm(X, X).dtype)

    class Model(torch.nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            assert torch.compiler.is_exporting()
            in_threads(serve)
            return torch.relu(a)

    torch.export.export(Model(), (X,), strict=False)
    assert set(found) == {torch.float32}


def test_an_export_that_is_refused_leaves_no_region_on():
    """Everything after a refused export would run in mixed precision, unasked."""

    class Product(torch.nn.Module):
        def forward(self, x):
            with amp_core.autocast("cpu", policy=amp_core.OpPolicy.uniform("cpu")):
                return x @ x

    with pytest.raises(amp_core.PolicyError):
        torch.export.export(Product(), (torch.ones(2, 2),))
    assert not torch.is_autocast_enabled("cpu")


def test_an_export_with_a_recipe_names_no_way_that_is_refused_too() -> None:
    """The error sends to `materialize`, which takes no recipe either, and does not say so."""
    policy = amp_core.OpPolicy.default("cpu").override({"linear": amp_core.Recipe.mxfp8()})

    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with amp_core.autocast("cpu", policy=policy):
                return super().forward(x)

    with pytest.raises(amp_core.PolicyError, match="no recipes: no exported program quantises"):
        torch.export.export(Layer(2, 2), (torch.ones(2, 2),))
    with pytest.raises(amp_core.PolicyError, match="writes casts down, and no recipes"):
        amp_core.materialize(torch.nn.Linear(2, 2), (torch.ones(2, 2),), policy=policy)


def test_compile_with_a_policy() -> None:
    """A policy breaks the graph, is lost in compiled code, or stays in force after it."""
    exact = amp_core.OpPolicy.default("cpu").override({"mm": "fp32"})

    def function(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with amp_core.autocast("cpu", policy=exact):
            inner = torch.mm(a, a)
        with amp_core.autocast("cpu"):
            return inner, torch.mm(a, a)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert [t.dtype for t in compiled(X)] == [torch.float32, torch.bfloat16]
    assert inside(X).dtype is torch.bfloat16


def test_a_backend_that_cleans_the_graph_keeps_the_policy() -> None:
    """Entering a policy has no result: it goes as dead code, and the rules with it, in silence."""
    exact = amp_core.OpPolicy.default("cpu").override({"mm": "fp32"})

    def function(a: torch.Tensor) -> torch.Tensor:
        with amp_core.autocast("cpu", policy=exact):
            return torch.mm(a, a)

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return graph

    torch._dynamo.reset()
    assert torch.compile(function, backend=backend, fullgraph=True)(X).dtype is function(X).dtype


def test_compile_with_a_region_with_a_policy_from_outside() -> None:
    """The policy of a region that was built outside the compiled function is lost in silence."""
    outside = amp_core.autocast("cpu", policy=amp_core.OpPolicy.default("cpu").override({"mm": "fp32"}))

    def function(a: torch.Tensor) -> torch.Tensor:
        with outside:
            return torch.mm(a, a)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert compiled(X).dtype is function(X).dtype is torch.float32


@pytest.mark.skipif(not hasattr(torch.compiler, "nested_compile_region"), reason="new in torch 2.8")
@pytest.mark.parametrize("handed", [False, True])
def test_a_region_compiled_once_for_several_layers(handed: bool) -> None:
    """Regions built outside end in an internal error, or layers get the graph of another region."""
    exact = amp_core.OpPolicy.default("cpu").override({"mm": "fp32"})
    regions = [
        amp_core.autocast("cpu", dtype=torch.bfloat16),
        amp_core.autocast("cpu", dtype=torch.bfloat16),
        amp_core.autocast("cpu", dtype=torch.float16),
        amp_core.autocast("cpu", dtype=torch.bfloat16, policy=exact),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ]

    class Layer(torch.nn.Module):
        def __init__(self, region: torch.autocast) -> None:
            super().__init__()
            self.region = region

        @torch.compiler.nested_compile_region
        def forward(self, a: torch.Tensor, given: torch.autocast | None) -> torch.Tensor:
            with self.region if given is None else given:
                return torch.mm(a, a)

    layers = torch.nn.ModuleList(map(Layer, regions))

    def function(a: torch.Tensor) -> list[torch.Tensor]:
        return [layer(a, layer.region if handed else None) for layer in layers]

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert [t.dtype for t in compiled(X)] == [t.dtype for t in function(X)]
