"""Each rule on the ops that torch's own samples call, against casts written out.

The policy has one rule alone, so that nothing else casts. Arguments have dtypes drawn at random.
"""

from __future__ import annotations

import functools
import itertools
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from amp_core import OpPolicy, PolicyError, autocast
from amp_core.dispatch.activate import pushed

from .. import alike
from ..drawn import programs

LOW, HIGH = torch.bfloat16, torch.float32
NOTHING = OpPolicy("cpu")
BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType)  # others call several ops, or none
UNLIKE = (
    "empty",  # has no values
    "bernoulli",  # draws by the dtype
    "lstsq",  # LAPACK's last bits vary from run to run
    "_native_batch_norm_legit",  # the overload that writes is named apart
)


def cast_by_autocast(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def to(dtype: torch.dtype | None, values: Any) -> Any:
    return tree_map(lambda v: v.to(dtype) if dtype is not None and cast_by_autocast(v) else v, values)


def rounded(values: Any, _dtypes: set[torch.dtype]) -> Any:
    return to(HIGH, to(LOW, values))


def like_the_first(values: Any, _dtypes: set[torch.dtype]) -> Any:
    first, *others = values[0]
    dtype = first.dtype if cast_by_autocast(first) else None
    return [first, *to(dtype, others)], to(dtype, values[1])


BY_HAND: dict[str, Callable[[Any, set[torch.dtype]], Any]] = {
    "lower_precision_fp": lambda values, _: to(LOW, values),
    "fp32": lambda values, _: to(HIGH, values),
    "promote": lambda values, dtypes: to(HIGH if HIGH in dtypes else LOW, values),
    "promote_types": lambda values, dtypes: to(functools.reduce(torch.promote_types, dtypes), values),
    "fp32_if_mixed": lambda values, dtypes: to(HIGH if len(dtypes) > 1 else None, values),
    "match_destination": like_the_first,
    "low_in_fp32_out": rounded,
    "unchanged": lambda values, _: values,
}


@functools.cache
def direct() -> list[Any]:
    """Return what torch's tests know of the ops that their samples call by themselves."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    return [
        info
        for info in op_db
        if isinstance(info.op, BUILT_IN)
        and hasattr(torch.ops.aten, info.op.__name__)
        and HIGH in info.supported_dtypes("cpu")
        and not any(word in info.name for word in UNLIKE)
        and info.op is not torch.conj  # returns real tensors before the dispatcher sees them
    ]


@functools.cache
def samples(number: int) -> list[Any]:
    """Return arguments of the op with this number in `direct`."""
    torch.manual_seed(0)
    info = direct()[number]
    first = itertools.islice(info.sample_inputs("cpu", HIGH, requires_grad=info.supports_autograd), 20)
    return [([sample.input, *sample.args], sample.kwargs) for sample in first]


def copied(values: Any, seed: int) -> Any:
    """Return copies of the arguments, whose dtypes are drawn."""
    choose = random.Random(seed)

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        new = value.detach().clone()
        new = new.to(choose.choice([HIGH, HIGH, LOW])) if cast_by_autocast(new) else new
        return new.requires_grad_(value.requires_grad and new.is_floating_point())

    return tree_map(copy, values)


def outcome(call: Callable[[Any], Any], values: Any) -> list[Any] | str:
    """Return results and gradients, or the class of the error."""
    torch.manual_seed(0)
    try:
        results = tree_leaves(call(values))
        outputs = [r for r in results if isinstance(r, Tensor) and r.requires_grad and r.is_floating_point()]
        if outputs:
            torch.autograd.backward(outputs, [torch.full_like(output, 0.5) for output in outputs])
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return type(error).__name__
    return [*results, *(v.grad for v in tree_leaves(values) if isinstance(v, Tensor) and v.is_leaf)]


def same(one: Any, other: Any) -> bool:
    last_bits = 1e-6 if isinstance(one, Tensor) and one.dtype is HIGH else 0
    return alike.same(one, other, last_bits, last_bits)


@pytest.mark.filterwarnings("ignore")
def test_rules_by_hand() -> None:
    """An op under a rule casts other arguments, in another order or to other dtypes than the rule says."""
    compared: set[str] = set()
    assert len(direct()) > 300
    for choose in programs(8.0, number="rules"):
        number = choose.randrange(len(direct()))
        op, given = direct()[number].op, choose.choice(samples(number))
        rule, seed = choose.choice([*BY_HAND]), choose.randrange(10**6)
        values = copied(given, seed)
        dtypes = {v.dtype for v in tree_leaves(values) if cast_by_autocast(v)}
        try:
            policy = NOTHING.override({op.__name__: rule})
        except PolicyError:  # such as match_destination where an op has one tensor
            continue
        if not dtypes or (rule == "promote" and len(dtypes) > 1):  # optional tensors do not count there
            continue

        def by_hand(values: Any, op: Any = op, rule: str = rule, dtypes: Any = dtypes) -> Any:
            args, kwargs = BY_HAND[rule](values, dtypes)
            return op(*args, **kwargs)

        def by_rule(values: Any, op: Any = op, policy: OpPolicy = policy) -> Any:
            with autocast("cpu", dtype=LOW, policy=policy):
                return op(*values[0], **values[1])

        wanted, got = outcome(by_hand, values), outcome(by_rule, copied(given, seed))
        again = outcome(by_hand, copied(given, seed))
        if isinstance(wanted, str) or isinstance(again, str) or not all(map(same, wanted, again)):
            assert isinstance(wanted, str) is isinstance(got, str), (op, rule, seed, wanted, got)
            continue  # torch raises, or writes to what it was given
        assert len(got) == len(wanted), (op, rule, seed, got)
        assert all(map(same, wanted, got)), (op, rule, seed, dtypes, wanted, got)
        assert (torch.is_autocast_enabled("cpu"), pushed()) == (False, 0)
        compared.add(op.__name__)
    assert len(compared) > 3


STATISTICS = {
    "batch_norm": nn.BatchNorm2d,
    "instance_norm": functools.partial(nn.InstanceNorm2d, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("op", STATISTICS)
@pytest.mark.parametrize("kept_in", [LOW, HIGH])
@pytest.mark.parametrize("rule", ["fp32", "lower_precision_fp", "low_in_fp32_out"])
def test_running_statistics(op: str, rule: str, kept_in: torch.dtype) -> None:
    """A norm updates casts of its running statistics, which are lost: evaluation then uses the first ones."""
    x, norm = torch.randn(4, 3, 5, 5).to(LOW), STATISTICS[op](3).to(kept_in)
    region = autocast("cpu", dtype=LOW, policy=NOTHING.override({op: rule}))
    names = ("running_mean", "running_var")
    dtype = LOW if rule == "lower_precision_fp" else HIGH
    wanted = {name: getattr(norm, name).to(dtype, copy=True) for name in names}
    getattr(torch, op)(x.to(dtype), None, None, *wanted.values(), True, 0.1, 1e-5, False)
    with region:
        gradients = torch.autograd.grad(norm(x).float().square().sum(), norm.weight)
    assert gradients[0].dtype is kept_in
    for name in names:
        torch.testing.assert_close(getattr(norm, name).float(), wanted[name].float(), rtol=0.01, atol=0.001)
    kept = {name: getattr(norm, name).normal_().abs_().clone() for name in names}
    with region:
        norm.eval()(x)
    assert all(torch.equal(getattr(norm, name), kept[name]) for name in names)


@pytest.mark.parametrize("rule", ["fp32", "lower_precision_fp"])
def test_running_statistics_in_compiled_code(rule: str) -> None:
    """A compiled norm loses its running statistics, or a graph writes to them apart from the op."""
    x, kept_in = torch.randn(4, 3, 5, 5).to(LOW), LOW if rule == "fp32" else HIGH
    norms = [nn.BatchNorm2d(3).to(kept_in) for _ in range(2)]
    policy = NOTHING.override({"batch_norm": rule})

    def step(norm: nn.Module) -> Tensor:
        with autocast("cpu", dtype=LOW, policy=policy):
            result: Tensor = norm(x)
        return result

    step(norms[0])
    torch.compile(step, backend="aot_eager", fullgraph=True)(norms[1])
    assert norms[0].running_mean.any()
    pairs = zip(norms[0].buffers(), norms[1].buffers(), strict=True)
    assert all(alike.same(one, other, 1e-6, 1e-6) for one, other in pairs)


def test_the_functional_form_of_a_norm() -> None:
    """It returns new statistics, and a rule must not round those that it was given."""
    policy = NOTHING.override({"_native_batch_norm_legit_functional": "lower_precision_fp"})
    statistics = [torch.rand(3) for _ in range(2)]
    kept = [each.clone() for each in statistics]
    with autocast("cpu", dtype=LOW, policy=policy):
        torch.ops.aten._native_batch_norm_legit_functional(
            torch.randn(4, 3, 2), None, None, *statistics, True, 0.1, 1e-5
        )
    assert all(map(torch.equal, statistics, kept))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("rule", ["lower_precision_fp", "low_in_fp32_out", "promote"])
def test_writes_to_nested_tensors(rule: str) -> None:
    """A strided nested tensor has no sizes to compare, so that no op under a rule can write to one."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    nested = nested.to(LOW if rule == "promote" else HIGH)
    others = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with autocast("cpu", dtype=LOW, policy=NOTHING.override({"add_": rule})):
        assert nested.add_(others) is nested
    assert [part.tolist() for part in nested.unbind()] == [[2.0] * 2, [2.0] * 3]
