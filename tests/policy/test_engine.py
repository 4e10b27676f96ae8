"""The Python engine against torch's native autocast kernels: the cpu policy routed through it whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists

import amp_core
from amp_core import OpPolicy
from amp_core._torch.op_kernels import registered
from amp_core.dispatch.activate import Activation, pop, pushed
from amp_core.dispatch.casting import make_runner, once_defined

torch.manual_seed(0)
LISTS = AutocastCPUTestLists(torch.device("cpu"))
CASES = [
    (f"{kind}-{index}-{entry[0]}", entry)
    for kind in ("torch_16", "torch_fp32", "nn_16", "nn_fp32", "torch_need_autocast_promote")
    for index, entry in enumerate(getattr(LISTS, kind))
]


@pytest.fixture
def routed():
    """The cpu policy, every rule of it run from Python; checks that nothing of it is left behind."""
    before = registered("AutocastCPU")
    policy = OpPolicy.default("cpu")
    table = {op: once_defined(op, lambda o, rule=rule: make_runner(o, rule, "cpu")) for op, rule in policy}
    yield Activation(policy, table, by_default=False)
    assert registered("AutocastCPU") == before
    assert pushed() == 0


def run_native(f, *args, dtype=torch.bfloat16, **kwargs):
    with torch.autocast("cpu", dtype):
        return f(*args, **kwargs)


def run_routed(active, f, *args, dtype=torch.bfloat16, **kwargs):
    with torch.autocast("cpu", dtype):
        active.push()
        try:
            return f(*args, **kwargs)
        finally:
            pop()


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return all(map(same, one, other))
    return one == other


def functions(name):
    found = [getattr(m, name) for m in (torch, torch._C._nn) if hasattr(m, name)]
    if hasattr(torch.Tensor, name):
        found.append(getattr(torch.Tensor, name))
    assert found, name
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("label", "entry"), CASES)
def test_op_of_the_differential_lists(label, entry, dtype, routed) -> None:
    """An op of torch's own autocast test lists computes otherwise through the engine."""
    name, args, *rest = entry
    kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
    for f in functions(name):
        expected = run_native(f, *args, dtype=dtype, **kwargs) if dtype is torch.bfloat16 else None
        if expected is None:
            try:
                expected = run_native(f, *args, dtype=dtype, **kwargs)
            except RuntimeError as error:  # a bfloat16 argument with an op that promotes
                with pytest.raises(RuntimeError, match=str(error).splitlines()[0][:40]):
                    run_routed(routed, f, *args, dtype=dtype, **kwargs)
                continue
        assert same(expected, run_routed(routed, f, *args, dtype=dtype, **kwargs))


@pytest.mark.parametrize("entry", LISTS.torch_expect_builtin_promote, ids=lambda e: e[0])
def test_ops_without_a_rule_promote_as_ever(entry, routed) -> None:
    """An op that autocast leaves alone must be left alone by the engine too."""
    name, bf16_args, fp16_args, expected = entry
    for args in (bf16_args, fp16_args):
        assert run_routed(routed, getattr(torch, name), *args).dtype is expected


X, W = torch.randn(4, 4), torch.randn(4, 4)
LOW = X.bfloat16()
VARIANTS = {
    "mm out=, float32": lambda: torch.mm(X, W, out=torch.empty(4, 4)),
    "mm out=, low": lambda: torch.mm(X, W, out=torch.empty(4, 4, dtype=torch.bfloat16)),
    "addmm_": lambda: X.clone().addmm_(X, W),
    "addmm_ low": lambda: LOW.clone().addmm_(X, W),
    "baddbmm_": lambda: X.clone()[None].baddbmm_(X[None], W[None]),
    "sum out=": lambda: torch.sum(LOW, 0, out=torch.empty(4)),
    "cat out=": lambda: torch.cat([X, LOW], out=torch.empty(8, 4)),
    "cat of a tuple": lambda: torch.cat((LOW, X, LOW), 1),
    "stack": lambda: torch.stack([LOW, X]),
    "chain_matmul": lambda: torch.chain_matmul(X, W, LOW),
    "linalg.multi_dot": lambda: torch.linalg.multi_dot([X, LOW.float(), W]),
    "einsum": lambda: torch.einsum("ij,jk,kl->il", X, LOW, W),
    "list of optional": lambda: X[torch.tensor([0, 1]), None],
    "index_put_": lambda: X.clone().index_put_((torch.tensor([0]),), torch.ones(1, 4)),
    "keyword arguments": lambda: torch.addmm(input=X, mat1=LOW, mat2=W, beta=2),
    "integers": lambda: torch.mm(X.int(), W.int()),
    "float64": lambda: torch.mm(X.double(), W.double()),
}


def outcome(call):
    try:
        return call()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, routed) -> None:
    """out=, in-place and list forms, or their errors, differ between the engine and torch's kernels."""
    expected = outcome(lambda: run_native(VARIANTS[name]))
    assert same(expected, outcome(lambda: run_routed(routed, VARIANTS[name])))


@pytest.mark.parametrize("op", ["to", "_to_copy", "copy_", "empty_like", "*"])
@pytest.mark.parametrize("rule", ["fp32", "lower_precision_fp"])
def test_rules_for_the_ops_that_cast(op, rule) -> None:
    """The cast that a rule asks for has that rule in turn, and never ends."""
    policy = OpPolicy.default("cpu").override({op: rule, "mm": rule})
    given, wanted = (torch.bfloat16, torch.float32)[:: 1 if rule == "fp32" else -1]
    x = torch.randn(3, 3, dtype=given)
    with amp_core.autocast("cpu", torch.bfloat16, policy=policy):
        product = torch.mm(x, x)
        copied = torch.zeros_like(x).copy_(x).to(torch.float64)
    assert product.dtype is wanted
    assert torch.equal(product, torch.mm(x.to(wanted), x.to(wanted)))
    assert copied.dtype is torch.float64


@pytest.mark.parametrize(
    ("rule", "op", "args"),
    [
        ("fp32_append_dtype", "norm.Scalar", ()),
        ("fp32_append_dtype", "norm.Scalar", (3,)),
        ("fp32_append_dtype", "norm.ScalarOpt_dim", (None, [0])),
        ("fp32_append_dtype", "norm.ScalarOpt_dim", (2, [0], True)),
        ("fp32_set_opt_dtype", "sum.default", ()),
        ("fp32_set_opt_dtype", "prod.dim_int", (1, True)),
        ("fp32_set_opt_dtype", "softmax.int", (0,)),
    ],
)
def test_rules_that_give_the_op_a_dtype(rule, op, args) -> None:
    """Such an op loses an argument, computes in low precision, or takes digits from float64."""
    name, _, overload = op.partition(".")
    call = getattr(getattr(torch.ops.aten, name), overload)
    policy = OpPolicy("cpu").override({f"aten::{op}": rule})
    for x, wide in ((LOW, LOW.float()), (X, X), (X.double(), X.double())):
        with amp_core.autocast("cpu", policy=policy):
            result = call(x, *args)
        torch.testing.assert_close(result, call(wide, *args), rtol=1e-6, atol=0)


@pytest.mark.parametrize("given", [{}, {"n": 3}, {"negate": True}, {"n": 3, "negate": True}])
def test_an_op_whose_overload_with_a_dtype_takes_names(given: dict[str, Any]) -> None:
    """Arguments that the call leaves to their defaults are given by position to an op that wants names."""

    def times(x: Any, n: int = 1, dtype: Any = None, *, negate: bool = False) -> Any:
        return x.to(dtype) * (-n if negate else n)

    name = f"amp_engine_test::times_{len(given)}_{'n' in given}"
    for overload, schema in {
        name: "(Tensor x, int n=1, *, bool negate=False) -> Tensor",
        f"{name}.dtype": "(Tensor x, int n, *, bool negate, ScalarType dtype) -> Tensor",
    }.items():
        torch.library.define(overload, schema)
        torch.library.impl(overload, "CompositeExplicitAutograd", times)
    policy, x = OpPolicy("cpu", {f"{name}.default": "fp32_append_dtype"}), torch.ones(2, dtype=torch.bfloat16)
    with amp_core.autocast("cpu", policy=policy):
        result = getattr(torch.ops.amp_engine_test, name.partition("::")[2])(x, **given)
    assert result.dtype is torch.float32
    assert torch.equal(result, times(x.float(), **given))
