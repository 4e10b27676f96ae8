"""Ops whose kernels call others, which torch runs without autocast under the modes that tools need."""

from __future__ import annotations

import functools
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import amp_core
from amp_core import OpPolicy, autocast

from .. import alike
from ..drawn import programs
from ..modes import Passing

torch.manual_seed(0)
X, Y = torch.randn(5, 3), torch.randn(3, 4)
EXACT = OpPolicy.default("cpu").override({"mm": "fp32", "matmul": "fp32"})


@torch.library.custom_op("amp_core_tests::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b).float()


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    a, b = ctx.saved_tensors
    return product(grad, b.T), product(a.T, grad)


product.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@torch.library.custom_op("amp_core_tests::product_of_its_own", mutates_args=())
def product_of_its_own(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        exact = a @ b
    with torch.autocast("cpu", torch.float16):
        return exact + product(a, b)


OPS = {
    "custom": lambda: product(X, Y),
    "own regions": lambda: product_of_its_own(X, Y),
    "bilinear": lambda: nn.functional.bilinear(X, X, torch.ones(2, 3, 3)),
    "pinv": lambda: torch.linalg.pinv(X),
    "gradients": lambda: torch.autograd.grad(product(p := X.clone().requires_grad_(), Y).sum(), p)[0],
}


@pytest.mark.parametrize("mode", [nullcontext, Passing])
@pytest.mark.parametrize("policy", [None, EXACT], ids=["default", "fp32"])
@pytest.mark.parametrize(
    ("name", "inference"), [*((name, False) for name in OPS), *((n, True) for n in OPS if n != "gradients")]
)
def test_tools_change_no_result(name, inference, policy, mode) -> None:
    """A recording, or a guarded step, computes in another precision than the program by itself."""
    model = nn.Module()
    model.forward = lambda _: OPS[name]()

    def run() -> Tensor:
        with torch.inference_mode() if inference else nullcontext(), autocast("cpu", policy=policy), mode():
            return model(None)

    expected = run()
    with amp_core.record():
        recorded = run()
    with amp_core.guard(model, steps=range(1)):
        guarded = run()
    assert recorded.dtype is guarded.dtype is expected.dtype
    assert torch.equal(recorded, expected)
    assert torch.equal(guarded, expected)


def test_report_of_what_a_kernel_calls() -> None:
    """The report says float32 of products that ran in bfloat16, and leaves out their casts."""
    with amp_core.record() as r, autocast("cpu"):
        product(X, Y)
    ran = {(key.kernel, key.dtypes, key.rule) for key in r.ops}
    assert ran == {
        ("aten::mm", "bfloat16", "lower_precision_fp"),
        ("amp_core_tests::product", "float32", ""),
    }
    assert sum(count.calls for count in r.casts.values()) == 2


@functools.cache
def ops() -> list[Any]:
    """Return what torch's own tests know of ops."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    return [op for op in op_db if torch.float32 in op.supported_dtypes("cpu") and "empty" not in op.name]


@functools.cache
def samples(number: int) -> list[Any]:
    """Return arguments of the op with this number in `ops`."""
    op = ops()[number]
    return [*itertools.islice(op.sample_inputs("cpu", torch.float32, op.supports_autograd), 5)]


def outcome(op: Any, sample: Any, *, in_region: bool, mode: Any) -> list[Any] | str:
    """Return results and gradients, or the error."""
    torch.manual_seed(0)
    try:
        with autocast("cpu") as region, mode():
            results = tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
        inputs = [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if needs_gradient(t)]
        outputs = [t for t in results if needs_gradient(t)]
        if not (inputs and outputs):
            return results
        with region if in_region else nullcontext(), mode():
            ones = [torch.ones_like(t) for t in outputs]
            return [*results, *torch.autograd.grad(outputs, inputs, ones, allow_unused=True)]
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        return str(error)


def needs_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()


def same(one: Any, other: Any) -> bool:
    return alike.same(one, other, 1e-4, 1e-5)


@pytest.mark.filterwarnings("ignore")
def test_recordings_of_any_op() -> None:
    """An op of torch's own tests, or its gradient, computes otherwise while it is recorded."""
    compared, number_of_ops = 0, len(ops())
    for choose in programs(12.0, number="recorded"):
        number = choose.randrange(number_of_ops)
        op, sample = ops()[number], choose.choice(samples(number))
        where: dict[str, Any] = {
            "in_region": choose.random() < 0.5,
            "mode": choose.choice([nullcontext, Passing]),
        }
        expected, again = (outcome(op, sample, **where) for _ in range(2))
        with amp_core.record():
            got = outcome(op, sample, **where)
        if isinstance(expected, str):
            assert got == expected, op.name
        elif isinstance(again, list) and all(map(same, expected, again)):
            assert isinstance(got, list), (op.name, got)
            assert len(got) == len(expected), op.name
            assert all(map(same, expected, got)), (op.name, expected, got)
            compared += 1
    assert compared > 10


def test_a_number_that_a_kernel_hands_on() -> None:
    """A comparison of ``2**x`` over a list ends in an error: the op inside takes a tensor for the 2."""
    results = []
    amp_core.compare(lambda: results.extend(torch._foreach_pow(2, [torch.arange(3.0)])), "cpu")
    assert [each.tolist() for each in results] == [[1.0, 2.0, 4.0]] * 2
