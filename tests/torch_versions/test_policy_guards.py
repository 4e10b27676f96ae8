"""A compiled function never runs a graph that was traced under another policy.

Since torch 2.15 Dynamo guards autocast objects by device, dtype and switches, which regions with different
policies have in common. Every program below is one code object that sees its policy change.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._functorch import config as functorch_config

from amp_core import OpPolicy, apply_policy, autocast, disable

X = torch.linspace(-1, 1, 16).reshape(4, 4)
DEFAULT = OpPolicy.default("cpu")
POLICIES: list[OpPolicy | None] = [
    None,
    DEFAULT.override({"mm": "fp32"}),
    DEFAULT.override({"add.Tensor": "lower_precision_fp"}),
    DEFAULT.override({"mm": "fp32", "add.Tensor": "lower_precision_fp"}),
    DEFAULT.override({"mm": "fp32"}),  # equal to an earlier one
]
in_force: Any = None


def ops(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    product = torch.mm(x, x)
    return product, x + x, product.exp()


class Holder:
    value: Any = None


def program(source: str, built_inside: bool, compiler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function of a policy that runs one compiled function under it."""

    def body(value: Any, x: Tensor) -> Any:
        with autocast("cpu", policy=value) if built_inside else value:
            return ops(x)

    cell, holder = None, Holder()

    def of_closure(x: Tensor) -> Any:
        return body(cell, x)

    def of_global(x: Tensor) -> Any:
        return body(in_force, x)

    def of_attribute(x: Tensor) -> Any:
        return body(holder.value, x)

    readers: dict[str, Any] = {"closure": of_closure, "global": of_global, "attribute": of_attribute}
    compiled = compiler(readers.get(source, body))

    def run(value: Any) -> Any:
        nonlocal cell
        global in_force
        cell = in_force = holder.value = value
        return compiled(value, X) if source == "argument" else compiled(X)

    return run


def dtypes(outputs: Any) -> list[torch.dtype]:
    return [output.dtype for output in outputs]


def check(source: str, built_inside: bool, backend: str, order: list[int], fullgraph: bool = True) -> None:
    torch._dynamo.reset()
    run = program(source, built_inside, lambda f: torch.compile(f, backend=backend, fullgraph=fullgraph))
    eager = program(source, built_inside, lambda f: f)
    for number in order:
        policy = POLICIES[number]
        values = [policy if built_inside else autocast("cpu", policy=policy) for _ in range(2)]
        assert dtypes(run(values[0])) == dtypes(eager(values[1])), (number, order)
    assert dtypes(ops(X)) == [torch.float32] * 3


SOURCES = ["argument", "global", "closure", "attribute"]


@pytest.mark.parametrize("built_inside", [True, False], ids=["policy", "region"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_policy_that_changes_between_calls(backend: str, source: str, built_inside: bool) -> None:
    """A compiled function computes by the policy of an earlier call."""
    check(source, built_inside, backend, [1, 0, 2, 1, 3, 4, 0, 2, 3])


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_a_policy_that_changes_between_calls_with_inductor(source: str) -> None:
    """As above, through the caches of inductor, which outlive a graph."""
    for built_inside in (True, False):
        check(source, built_inside, "inductor", [1, 0, 2, 1, 3, 4, 0, 2, 3])


@pytest.mark.slow
def test_random_orders() -> None:
    """An order of policies that no example has: a guard that holds for a pair but not for its reverse."""
    rng = random.Random(0)
    for source, inside in itertools.product(SOURCES, (True, False)):
        for _ in range(3):
            check(
                source, inside, "eager", [rng.randrange(len(POLICIES)) for _ in range(8)], rng.random() < 0.5
            )


def test_two_regions_in_one_graph() -> None:
    """Two regions that differ in their policies alone are taken for one."""

    def function(first: Any, second: Any, x: Tensor) -> Any:
        with first:
            one = ops(x)
        with second:
            return *one, *ops(x)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for first, second in [(0, 1), (1, 0), (1, 2), (2, 1), (3, 1), (0, 3)]:
        regions = [autocast("cpu", policy=POLICIES[n]) for n in (first, second)]
        assert dtypes(compiled(*regions, X)) == dtypes(function(*regions, X)), (first, second)


def test_module_policies_that_change() -> None:
    """A compiled model keeps the policy that `apply_policy` gave a module before."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for rules in ({"0": "fp32"}, {"1": "fp32"}, {"0": "fp32", "1": "fp32"}, {"0": "fp32"}):
        with apply_policy(model, rules), autocast("cpu"):
            assert compiled(X).dtype is model(X).dtype, rules
        with autocast("cpu"):
            assert compiled(X).dtype is model(X).dtype is torch.bfloat16


@pytest.mark.parametrize("policy", [None, POLICIES[1]], ids=["torch's rules", "policy"])
def test_equal_regions_share_a_graph(policy: OpPolicy | None) -> None:
    """A region that is built anew for every step compiles the model anew, up to torch's limit."""

    def function(region: autocast, x: Tensor) -> Tensor:
        with region:
            return torch.mm(x, x)

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for _ in range(3):
        compiled(autocast("cpu", policy=policy), X)
    assert counter.frame_count == 1
    assert compiled(autocast("cpu", torch.float16, policy=policy), X).dtype is not torch.bfloat16
    assert compiled(autocast("cpu", enabled=False), X).dtype is torch.float32
    assert counter.frame_count == 3


def test_equal_policies_of_several_lines_share_a_graph() -> None:
    """The place where a policy was made counts as a rule: training and evaluation compile a model each."""
    one = DEFAULT.override({"mm": "fp32"})
    other = DEFAULT.override({"mm": "fp32"})
    assert one.origins != other.origins
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda x: torch.mm(x, x), backend=counter, fullgraph=True)
    for policy in (one, other):
        with autocast("cpu", policy=policy):
            assert compiled(X).dtype is torch.float32
    assert counter.frame_count == 1


def test_equal_policies_of_several_layers_share_a_graph() -> None:
    """Layers that make a policy each compile one by one, and after torch's limit of 8 no more."""

    class Layer(torch.nn.Module):
        def __init__(self, rule: str) -> None:
            super().__init__()
            self.policy = DEFAULT.override({"mm": rule})

        def forward(self, x: Tensor) -> Tensor:
            with autocast("cpu", policy=self.policy):
                return torch.mm(x, x)

    torch._dynamo.reset()
    counter = CompileCounter()
    for rule, dtype in [("fp32", torch.float32), ("lower_precision_fp", torch.bfloat16)]:
        for _ in range(3):
            layer = Layer(rule)
            layer.compile(backend=counter, fullgraph=True)
            assert layer(X).dtype is dtype
    assert counter.frame_count == 2


def test_equal_rules_of_several_layers_share_a_graph() -> None:
    """Layers whose rules are named one by one compile one by one, up to torch's limit; the rest never do."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    apply_policy(model, {str(number): {"linear": "fp32"} for number in range(3)})
    torch._dynamo.reset()
    counter = CompileCounter()
    with torch.no_grad():
        for layer in model:
            layer.compile(backend=counter, fullgraph=True)
            with autocast("cpu"):
                assert layer(X).dtype is torch.float32
    assert counter.frame_count == 1


@pytest.mark.parametrize("setting", ["same_as_forward", "off", [{"device_type": "cpu"}]], ids=str)
def test_the_backward_pass_is_compiled_outside_of_the_region(setting: Any) -> None:
    """A gradient is multiplied in bfloat16 though its op has the rule fp32, or a user's choice is lost."""
    weight = torch.linspace(-2, 1, 16).reshape(4, 4).requires_grad_()

    def gradient(call: Callable[..., Tensor]) -> Tensor:
        with autocast("cpu", policy=DEFAULT.override({"linear": "fp32"})):
            out = call(X, weight)
        (found,) = torch.autograd.grad(out.square().sum(), weight)
        return found

    linear = torch.nn.functional.linear
    torch._dynamo.reset()
    with functorch_config.patch(backward_pass_autocast=setting):
        compiled = gradient(torch.compile(lambda x, w: linear(x, w), backend="aot_eager"))
    assert torch.equal(compiled, gradient(linear)) == isinstance(setting, str)


class Product(torch.autograd.Function):
    """A function that a policy names."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x @ x

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it
def test_rules_of_functions(inside: bool) -> None:
    """A graph keeps the rule that a function had when it was traced, or Dynamo fails on the rule."""
    rules = ["fp32", "lower_precision_fp", "fp32", "low_in_fp32_out"]
    torch._dynamo.reset()
    product = torch.compile(lambda x: Product.apply(x), backend="aot_eager")
    for rule in rules:
        region = autocast("cpu", policy=DEFAULT.override({f"{__name__}:Product": rule}))
        call = (
            torch.compile(region(lambda x: Product.apply(x)), backend="aot_eager")
            if inside
            else region(product)
        )
        found, wanted = call(X), region(Product.apply)(X)
        assert (found.dtype, found.tolist()) == (wanted.dtype, wanted.tolist())


def in_given(x: Tensor, region: Any) -> tuple[Tensor, Tensor, Tensor]:
    with region:
        return ops(x)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 saves compiled functions by a setting")
@pytest.mark.parametrize(
    "region", [None, autocast("cpu", policy=POLICIES[1]), disable()], ids=["none", "policy", "disable"]
)
def test_a_saved_function_runs_after_it_is_loaded(region: Any, tmp_path: Path) -> None:
    """A guard on policies or regions fails wherever it is loaded, also in programs that have no policy."""
    function, given = (ops, (X,)) if region is None else (in_given, (X, region))
    path = tmp_path / "compiled"
    torch._dynamo.reset()
    compiled: Any = torch.compile(function, backend="aot_eager", fullgraph=True)
    compiled.aot_compile((given, {})).save_compiled_function(str(path))
    with path.open("rb") as file:
        loaded: Any = torch.compiler.load_compiled_function(file)
    assert all(map(torch.equal, loaded(*given), function(*given)))
    with autocast("cpu", policy=POLICIES[1]), pytest.raises(RuntimeError, match="policy changed"):
        loaded(*given)
    if region is not None:
        with pytest.raises(RuntimeError, match="check failed"):
            loaded(X, autocast("cpu", policy=POLICIES[2]))


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 saves compiled functions by a setting")
def test_a_saved_function_in_another_process(tmp_path: Path) -> None:
    """It runs under whichever policy was the first there, or refuses its own."""
    script = Path(__file__).parent / "data" / "saved_function.py"

    def run(mode: str, op: str) -> str:
        command = [sys.executable, str(script), mode, str(tmp_path / "compiled"), op]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    run("save", "matmul")
    assert run("load", "matmul") == "torch.float32\n"
    assert run("load", "softmax") == "True\n"
