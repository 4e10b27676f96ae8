"""Rules for ops that torch's autocast does not know: shipped ones, and those of other packages by name."""

from __future__ import annotations

import itertools
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import OpPolicy, PolicyError, autocast
from amp_core.dispatch import engine
from amp_core.dispatch.low_in_fp32_out import _COMPOSED

LOW, HIGH = torch.bfloat16, torch.float32
DEFAULT = OpPolicy.default("cpu")
_numbers = itertools.count()


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


# grouped_mm, which amp-core gives a rule.

OFFSETS = torch.tensor([2, 8], dtype=torch.int32)


def grouped(x: Tensor, weight: Tensor) -> Tensor:
    return F.grouped_mm(x, weight, offs=OFFSETS)


def test_grouped_mm_runs_in_low_precision_forward_and_backward() -> None:
    """A mixture of experts runs its largest products in float32, unseen, or raises on mixed inputs."""
    x, weight = leaves((8, 16), (2, 16, 16))
    upstream = torch.randn(8, 16).to(LOW)
    with autocast("cpu"):
        y = grouped(x.to(LOW), weight)  # mixed, as after a linear layer
    assert y.dtype is LOW
    wanted = grouped(x.to(LOW), weight.to(LOW))
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)
    for mine, by_hand in zip(
        torch.autograd.grad(y, (x, weight), upstream),
        torch.autograd.grad(wanted, (x, weight), upstream),
        strict=True,
    ):
        assert mine.dtype is HIGH
        torch.testing.assert_close(mine, by_hand, rtol=0, atol=0)


def test_grouped_mm_in_a_checkpoint_is_recomputed_in_the_same_dtype() -> None:
    """The recomputation runs under torch's state alone: a rule of our regions only would be missing there."""
    x, weight = leaves((8, 16), (2, 16, 16))
    with autocast("cpu"):
        y = checkpoint(grouped, x, weight, use_reentrant=False)
    y.float().square().mean().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is HIGH


def test_grouped_mm_compiles() -> None:
    """A compiled expert layer computes in another precision than the eager one."""
    x, weight = leaves((8, 16), (2, 16, 16))

    def step(x: Tensor, weight: Tensor) -> Tensor:
        with autocast("cpu"):
            return grouped(x, weight)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, weight), step(x, weight))


def test_a_policy_can_take_the_shipped_rule_away() -> None:
    """Who wants float32 experts must be able to say so."""
    x, weight = leaves((8, 16), (2, 16, 16))
    for rule, dtype in (("unchanged", HIGH), ("fp32", HIGH), ("lower_precision_fp", LOW)):
        with autocast("cpu", policy=DEFAULT.override({"_grouped_mm": rule})):
            assert grouped(x.detach(), weight.detach()).dtype is dtype
    assert "amp-core" in str(DEFAULT.explain("_grouped_mm"))


# Custom ops by name.


def test_a_policy_can_take_the_rule_of_another_package_away() -> None:
    """An op keeps a rule that torch.library got after the first policy, though a policy says unchanged."""
    name = f"amp_core_ruled_{next(_numbers)}::twice"
    twice = torch.library.custom_op(name, lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    twice.register_autocast("cpu", LOW)
    assert "twice.default: native (by the package of the op)" in str(DEFAULT.explain(name))
    unchanged, x = DEFAULT.override({name: "unchanged"}), torch.ones(3)
    policies = {
        DEFAULT: LOW,
        unchanged: HIGH,
        OpPolicy.from_toml(unchanged.to_toml()): HIGH,
        unchanged.override({name: "native"}): LOW,
    }
    for policy, dtype in policies.items():
        with autocast("cpu", policy=policy):
            assert twice(x).dtype is dtype


@pytest.fixture
def later() -> Iterator[tuple[str, Callable[[], None]]]:
    """The name of an op that is not defined, and a function that defines it."""
    namespace = f"amp_core_later_{next(_numbers)}"
    libraries = []

    def define() -> None:
        library = torch.library.Library(namespace, "DEF")
        library.define("product(Tensor a, Tensor b) -> Tensor")
        library.impl("product", lambda a, b: a * b, "CompositeExplicitAutograd")
        libraries.append(library)

    yield f"{namespace}::product", define
    for library in libraries:
        library._destroy()


@pytest.mark.parametrize("toml", [False, True])
def test_a_custom_op_gets_its_rule_before_it_is_defined(
    later: tuple[str, Callable[[], None]], toml: bool
) -> None:
    """A policy file would depend on the order of imports."""
    name, define = later
    policy = DEFAULT.override({name: "lower_precision_fp"})
    if toml:
        policy = OpPolicy.from_toml(f'[rules]\n"{name}" = "lower_precision_fp"\n', "cpu")
    assert policy.rule(name) == "lower_precision_fp"
    x = torch.ones(2, 2)
    with autocast("cpu", policy=policy):
        define()
        op = getattr(torch.ops, name.split("::")[0]).product
        assert op(x, x).dtype is LOW
        with autocast("cpu", policy=DEFAULT):
            assert op(x, x).dtype is HIGH
    assert op(x, x).dtype is HIGH
    with autocast("cpu", policy=policy):
        assert op(x, x).dtype is LOW


def test_a_region_leaves_a_rule_for_a_later_op_valid(later: tuple[str, Callable[[], None]]) -> None:
    """Read, unpickled or extended after its first region, it is refused: the kernel looks like an op."""
    name, _ = later
    policy = DEFAULT.override({name: "fp32"})
    with autocast("cpu", policy=policy):
        pass
    assert OpPolicy.from_toml(policy.to_toml()) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert policy.override({name + "s": "fp32"}).rule(name + "s") == "fp32"


def test_a_misspelt_op_of_a_defined_namespace_is_refused(later: tuple[str, Callable[[], None]]) -> None:
    """A rule for an op that does not exist would have no effect, silently."""
    name, define = later
    define()
    with pytest.raises(PolicyError, match=r"Did you mean .*::product"):
        DEFAULT.override({name + "s": "fp32"})


@pytest.mark.parametrize("name", ["a::b::c", "a::b.c.d", "a::b(", "a::1b", "a b::c", "a::ß", "ß::a"])
def test_what_no_op_can_be_called_is_refused(name: str) -> None:
    """The first region with the policy ends in an error of torch's parser, which names neither."""
    with pytest.raises(PolicyError, match=r"cannot be the name of an op.*Write namespace::name"):
        DEFAULT.override({name: "fp32"})


# Autograd functions by name.

SQUARE = """
import torch
class Product(torch.autograd.Function):
    @staticmethod
    def forward(x, y):
        return x @ y
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad @ y.t(), x.t() @ grad
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        assert grad.dtype is x.dtype
        return 2 * x * grad
square = Square.apply
class Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *given):
        Given.last = given
"""


@pytest.fixture
def module() -> Iterator[tuple[str, Callable[[], types.ModuleType]]]:
    """The name of a module that is not imported, and a function that imports it."""
    name = f"amp_core_functions_{next(_numbers)}"

    def load() -> types.ModuleType:
        sys.modules[name] = loaded = types.ModuleType(name)
        exec(SQUARE, loaded.__dict__)
        return loaded

    yield name, load
    sys.modules.pop(name, None)


@pytest.mark.parametrize("rule", ["lower_precision_fp", "fp32", "low_in_fp32_out"])
@pytest.mark.parametrize("imported", [False, True])
def test_a_function_of_another_package_gets_a_rule(
    module: tuple[str, Callable[[], types.ModuleType]], imported: bool, rule: str
) -> None:
    """Kernels behind an autograd function run in whichever dtype arrives, also once ``apply`` was bound."""
    name, load = module
    loaded = load() if imported else None
    policy = DEFAULT.override({f"{name}:Square": rule})
    with autocast("cpu", policy=policy):
        loaded = loaded or load()
        (x,) = leaves((4, 4))
        y = loaded.square(x)
    rounded = x.detach() if rule == "fp32" else x.detach().to(LOW).float()
    assert y.dtype is (LOW if rule == "lower_precision_fp" else HIGH)
    assert torch.equal(y, (rounded * rounded).to(y.dtype))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is HIGH
    assert torch.equal(x.grad, 2 * rounded)
    assert loaded.square(x).dtype is HIGH
    assert loaded.square(x.detach().to(LOW)).dtype is LOW
    for other in (None, DEFAULT.override({"mm": "fp32"})):
        with autocast("cpu", policy=other):
            assert loaded.square(x).dtype is HIGH


def test_a_function_with_setup_context_saves_what_it_computed_with(
    module: tuple[str, Callable[[], types.ModuleType]],
) -> None:
    """The backward pass multiplies gradients in one dtype by saved inputs in another, and fails."""
    name, load = module
    x, y = leaves((4, 4), (4, 4))
    with autocast("cpu", policy=DEFAULT.override({f"{name}:Product": "lower_precision_fp"})):
        result = load().Product.apply(x, y)
    result.backward(torch.ones_like(result))
    rounded, ones = y.detach().to(LOW), torch.ones(4, 4, dtype=LOW)
    assert result.dtype is LOW
    assert x.grad is not None
    assert torch.equal(x.grad, (ones @ rounded.t()).float())


def test_a_function_gets_the_containers_that_it_was_given(
    module: tuple[str, Callable[[], types.ModuleType]],
) -> None:
    """A tuple or namedtuple of tensors arrives as a list, and a mapping with the tensors in another dtype."""
    name, load = module
    function, low = load().Given, torch.ones(2, dtype=LOW)
    pair = torch.max(low[None], 0)
    with autocast("cpu", policy=DEFAULT.override({f"{name}:Given": "fp32"})):
        function.apply((low, 1), pair, {"a": [low]})
    first, second, third = function.last
    assert (type(first), first[0].dtype, first[1]) == (tuple, HIGH, 1)
    assert (type(third["a"]), third["a"][0].dtype) == (list, HIGH)
    assert (type(second), second.values.dtype, second.indices.dtype) == (type(pair), HIGH, torch.int64)


@pytest.mark.parametrize("order", [1, -1])
def test_a_function_has_the_rule_of_the_device_of_its_arguments(
    module: tuple[str, Callable[[], types.ModuleType]], monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    """In regions of two devices, the rule of one holds for arguments on the other."""
    name, load = module
    square, x = load().square, torch.ones(2, dtype=LOW)
    low = OpPolicy.default("mtia").override({f"{name}:Square": "lower_precision_fp"})
    exact = DEFAULT.override({f"{name}:Square": "fp32"})
    with autocast("mtia", policy=low), autocast("cpu", policy=exact):
        monkeypatch.setattr(engine, "_engines", dict(list(engine._engines.items())[::order]))
        assert square(x).dtype is HIGH


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.skipif(torch.__version__ < "2.13", reason="this torch's Dynamo cannot guard the policy in force")
def test_a_function_with_a_rule_compiles(module: tuple[str, Callable[[], types.ModuleType]]) -> None:
    """A compiled function keeps the precision of the region in which it was traced."""
    name, load = module
    square = load().square
    (x,) = leaves((4, 4))
    compiled = torch.compile(lambda x: square(x) + 1, backend="aot_eager", fullgraph=True)
    with autocast("cpu", policy=DEFAULT.override({f"{name}:Square": "lower_precision_fp"})):
        assert compiled(x).dtype is LOW
    assert compiled(x).dtype is HIGH


def test_a_class_that_no_name_leads_to_is_refused() -> None:
    """The rule is taken, and the first region with the policy ends in an error of torch's parser."""

    class Local(torch.autograd.Function):
        pass

    with pytest.raises(PolicyError, match=r"<locals>\.Local is defined inside a function.*top level"):
        DEFAULT.override({Local: "fp32"})


def test_a_function_can_be_given_as_a_class(module: tuple[str, Callable[[], types.ModuleType]]) -> None:
    """Who has the class at hand need not spell its name."""
    name, load = module
    policy = DEFAULT.override({load().Square: "fp32"})
    assert policy.rule(f"{name}:Square") == "fp32"
    with autocast("cpu", policy=policy):
        assert sys.modules[name].square(torch.ones(2, dtype=LOW)).dtype is HIGH


@pytest.mark.parametrize("name", ["repo-name.kernels", "3rd.kernels", "<torch_package_0>.kernels", "größe"])
@pytest.mark.parametrize("listed", [True, False])
def test_a_function_of_a_module_that_no_import_statement_names(
    name: str, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule of a module that `importlib` or `torch.package` loaded is lost, or taken for that of an op."""
    loaded = types.ModuleType(name)
    if listed:
        monkeypatch.setitem(sys.modules, name, loaded)
    exec(SQUARE.replace("Square", "Öffnung"), loaded.__dict__)
    policy = OpPolicy.from_toml(DEFAULT.override({loaded.Öffnung: "fp32"}).to_toml())
    assert policy.rule(f"{name}:Öffnung") == "fp32"
    with autocast("cpu", policy=policy):
        assert loaded.square(torch.ones(2, dtype=LOW)).dtype is HIGH


def test_a_function_that_is_defined_again_keeps_its_rule(
    module: tuple[str, Callable[[], types.ModuleType]],
) -> None:
    """After ``importlib.reload``, as notebooks do it, the function runs in another dtype."""
    name, load = module
    x = torch.ones(2, dtype=LOW)
    with autocast("cpu", policy=DEFAULT.override({f"{name}:Square": "fp32"})):
        for _ in range(3):
            assert load().square(x).dtype is HIGH


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("Sqare", r"has no 'Sqare', so a rule would have no effect\. Did you mean '.*:Square'"),
        ("Elsewhere.f", r"has no 'Elsewhere\.f'.*Name the module that defines it"),
        ("square", r"is no subclass of torch\.autograd\.Function.*apply_policy"),
        ("torch.nn.Linear", r"is no subclass of torch\.autograd\.Function"),
    ],
)
def test_what_is_no_function_of_an_imported_module_is_refused(
    module: tuple[str, Callable[[], types.ModuleType]], wrong: str, message: str
) -> None:
    """A misspelt name has no effect, and the ``forward`` of a module would lose its ``self``."""
    name, load = module
    load()
    with pytest.raises(PolicyError, match=message):
        DEFAULT.override({f"{name}:{wrong}": "fp32"})


# Low in, float32 out.

SHAPES = {
    "mm": [(5, 8), (8, 3)],
    "bmm": [(2, 5, 8), (2, 8, 3)],
    "matmul": [(2, 5, 8), (8, 3)],
    "addmm": [(3,), (5, 8), (8, 3)],
    "baddbmm": [(2, 5, 3), (2, 5, 8), (2, 8, 3)],
    "linear": [(2, 5, 8), (3, 8), (3,)],
}
OPS = {name: getattr(torch, name, None) or F.linear for name in SHAPES}


def test_every_composed_op_is_tested() -> None:
    """An op that gains a fast form needs its line above."""
    assert {f"aten.{name}.default" for name in SHAPES} == set(_COMPOSED)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_portable_form_is_the_float32_op_on_rounded_inputs(name: str, dtype: torch.dtype) -> None:
    """The documented bits, forward and backward: a router must not depend on the device's kernel."""
    args = leaves(*SHAPES[name])
    with autocast("cpu", dtype, policy=DEFAULT.override({name: "low_in_fp32_out"})):
        y = OPS[name](*args)
    wanted = OPS[name](*(a.to(dtype).float() for a in args))
    assert y.dtype is HIGH
    assert torch.equal(y, wanted)
    upstream = torch.randn_like(y)
    mine = torch.autograd.grad(y, args, upstream)
    by_hand = torch.autograd.grad(wanted, args, upstream)
    for a, b in zip(mine, by_hand, strict=True):
        assert a.dtype is HIGH
        assert torch.equal(a, b)


@pytest.fixture
def wide_products() -> Iterator[list[str]]:
    """Kernels for ``mm.dtype`` and ``bmm.dtype`` on the CPU, which torch lacks; the calls that arrive."""
    calls: list[str] = []

    def kernel(name: str) -> Callable[..., Tensor]:
        def run(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
            assert a.dtype is b.dtype is LOW
            calls.append(name)
            return torch.matmul(a.to(out_dtype), b.to(out_dtype))

        return run

    library = torch.library.Library("aten", "IMPL")
    for name in ("mm.dtype", "bmm.dtype"):
        library.impl(name, kernel(name), "CPU")
    yield calls
    library._destroy()


@pytest.mark.parametrize("name", SHAPES)
def test_a_device_with_wide_products_multiplies_the_low_tensors(name: str, wide_products: list[str]) -> None:
    """The fast form must be used where there is one, with the derivative that torch lacks."""
    args = leaves(*SHAPES[name])
    policy = DEFAULT.override({name: "low_in_fp32_out"}, origin=f"wide {next(_numbers)}")
    with autocast("cpu", policy=policy):
        y = OPS[name](*args)
    assert len(wide_products) == 1
    rounded = [a.to(LOW).float() for a in args]
    wanted = OPS[name](*rounded)
    assert y.dtype is HIGH
    torch.testing.assert_close(y, wanted)
    upstream = torch.randn_like(y)
    mine = torch.autograd.grad(y, args, upstream)
    by_hand = torch.autograd.grad(wanted, args, upstream)
    for a, b in zip(mine, by_hand, strict=True):
        assert a.dtype is HIGH
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.05)


# Where a rule is missing.


def test_record_lists_heavy_ops_without_a_rule(tmp_path: Path) -> None:
    """The user must learn which products autocast left alone, and of no others."""
    x = torch.randn(4, 4)
    with amp_core.record() as r:
        torch.mv(x, x[0])  # outside
        with autocast("cpu"):
            torch.mv(x, x[0])
            torch.mm(x, x).sum()
    assert [(key.kernel, calls) for key, calls in r.unruled.items()] == [("aten::mv", 1)]
    assert "Heavy ops without a rule (1)" in str(r)
    r.save(tmp_path / "r.json")
    assert amp_core.Recording.load(tmp_path / "r.json").unruled == r.unruled
    with amp_core.record() as r, autocast("cpu", policy=DEFAULT.override({"mv": "fp32"})):
        torch.mv(x, x[0])
    assert not r.unruled


def test_record_lists_custom_ops_without_a_rule(later: tuple[str, Callable[[], None]]) -> None:
    """A kernel of another package that bypasses the rules is the likeliest one to be missed."""
    name, define = later
    define()
    x = torch.ones(2, 2)
    with amp_core.record() as r, autocast("cpu"):
        getattr(torch.ops, name.split("::")[0]).product(x, x)
    assert [key.kernel for key in r.unruled] == [name]
