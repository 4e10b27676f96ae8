"""custom_fwd, custom_bwd and the casting of their arguments, against torch's."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import types
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

import amp_core

Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    size: int = 3


def make(amp: Any, cast_inputs: torch.dtype | None, setup: bool, seen: list[Any]) -> Any:
    fwd = amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
    bwd = amp.custom_bwd(device_type="cpu")

    @bwd
    def decorated(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), grad.dtype))
        return (grad @ w.t()).to(x.dtype), (x.t() @ grad).to(w.dtype)

    if setup:

        class WithSetup(torch.autograd.Function):
            @staticmethod
            @fwd
            def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
                return x @ w

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                ctx.save_for_backward(*inputs)

            backward = staticmethod(decorated)

        return WithSetup

    class WithCtx(torch.autograd.Function):
        @staticmethod
        @fwd
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        backward = staticmethod(decorated)

    return WithCtx


def run(amp: Any, cast_inputs: torch.dtype | None, setup: bool, region: bool) -> tuple[Any, ...]:
    torch.manual_seed(0)
    seen: list[Any] = []
    function = make(amp, cast_inputs, setup, seen)
    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=region):
        out = function.apply(x, w)
    out.sum().backward()
    return out.dtype, seen, x.grad, w.grad


@pytest.mark.parametrize("cast_inputs", [None, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("region", [True, False])
def test_same_as_torch(cast_inputs: torch.dtype | None, region: bool) -> None:
    """The forward, the backward or a gradient is in another dtype than under torch's decorators."""
    theirs, ours = (run(amp, cast_inputs, False, region) for amp in (torch.amp, amp_core))
    assert ours[:2] == theirs[:2]
    assert torch.equal(ours[2], theirs[2])
    assert torch.equal(ours[3], theirs[3])


@pytest.mark.parametrize("cast_inputs", [None, torch.float32])
def test_setup_context(cast_inputs: torch.dtype | None) -> None:
    """A function with setup_context fails in its backward, or runs it in another state than with ctx."""
    with pytest.raises(AttributeError, match="_fwd_used_autocast"):
        run(torch.amp, cast_inputs, True, True)
    ours, other = (run(amp_core, cast_inputs, setup, True) for setup in (True, False))
    assert ours[0] == other[0]
    assert ours[1] == other[1]


def test_setup_context_in_several_threads(in_threads: Callable[..., None]) -> None:
    """The first calls come from several threads, and one of them finds no autocast state in its backward."""
    for _ in range(100):
        function = make(amp_core, None, True, [])

        def work(function: Any = function) -> None:
            x, w = (torch.ones(3, 3, requires_grad=True) for _ in range(2))
            function.apply(x, w).sum().backward()

        in_threads(*[work] * 8)


@pytest.mark.parametrize("first", [[], ["base"], ["base", "inherits"]])
def test_functions_with_the_same_forward(first: list[str]) -> None:
    """A class that inherits `forward`, or is defined after the first call, has no state in its backward."""
    base = make(amp_core, None, True, [])
    functions = {"base": base}

    def gradient(name: str) -> torch.Tensor:
        x = torch.rand(3, 3, requires_grad=True)
        with amp_core.autocast("cpu"):
            out = functions[name].apply(x, x.detach())
        out.sum().backward()
        assert x.grad is not None
        return x.grad

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    if first:
        gradient("base")
    functions["inherits"] = type("Inherits", (base,), {"setup_context": staticmethod(setup_context)})
    if "inherits" in first:
        gradient("inherits")
    other = make(amp_core, None, True, [])
    other.forward = staticmethod(base.forward)
    other.setup_context = staticmethod(functools.wraps(base.setup_context)(setup_context))
    again = type("Again", (functions["inherits"],), {"setup_context": staticmethod(setup_context)})
    functions |= {"shares": other, "inherits again": again}
    for name in ("inherits again", "shares", "inherits", "base"):
        gradient(name)


def test_functions_that_are_made_anew_are_freed() -> None:
    """A forward that they share keeps each of them, and their number grows with the calls."""
    shared = make(amp_core, None, True, []).forward

    def made() -> weakref.ref[Any]:
        function = make(amp_core, None, True, [])
        function.forward = staticmethod(shared)
        x = torch.rand(3, 3, requires_grad=True)
        function.apply(x, x).sum().backward()
        return weakref.ref(function)

    refs = [made() for _ in range(3)]
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


class Doubled(torch.autograd.Function):
    @staticmethod
    @amp_core.custom_fwd(device_type="cpu")
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = 2

    @staticmethod
    @amp_core.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.factor


def test_setup_context_of_a_function_with_a_rule() -> None:
    """The rule's wrapper hides the decorated forward, and the backward finds no state."""
    x = torch.ones(2, requires_grad=True)
    policy = amp_core.OpPolicy.default("cpu").override({Doubled: "lower_precision_fp"})
    with amp_core.autocast("cpu", policy=policy):
        out = Doubled.apply(x)
    out.sum().backward()
    assert out.dtype is torch.bfloat16
    assert torch.equal(x.grad, torch.full((2,), 2.0))


class Product(torch.autograd.Function):
    """A function of the older style; `custom_bwd` finds the state on `ctx`."""

    @staticmethod
    @amp_core.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @amp_core.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


class ProductWithSetup(torch.autograd.Function):
    """The same, where `setup_context` has to be handed the state."""

    @staticmethod
    @amp_core.custom_fwd(device_type="cpu")
    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @amp_core.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


EXACT = amp_core.OpPolicy.default("cpu").override({"matmul": "fp32"})


@pytest.mark.parametrize("function", [Product, ProductWithSetup])
@pytest.mark.parametrize("policy", [None, EXACT])
@pytest.mark.parametrize("around", ["no region", None, EXACT])
def test_backward_has_the_policy_of_the_forward(
    function: Any, policy: amp_core.OpPolicy | None, around: amp_core.OpPolicy | str | None
) -> None:
    """The backward computes by the policy around `backward()`, or by none."""
    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    with amp_core.autocast("cpu", policy=policy):
        product = function.apply(x, w)
    loss = (product.float() * torch.rand(3, 3)).sum()
    with nullcontext() if isinstance(around, str) else amp_core.autocast("cpu", policy=around):
        loss.backward()
    assert product.dtype is (torch.bfloat16 if policy is None else torch.float32)
    assert torch.equal(x.grad, x.grad.bfloat16()) is (policy is None)


def test_bwd_without_fwd_says_what_is_missing() -> None:
    """The error is an AttributeError on a private name."""

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        @amp_core.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    with pytest.raises(RuntimeError, match=r"decorate Half.forward with custom_fwd"):
        Half.apply(torch.ones(1, requires_grad=True)).backward()


@pytest.mark.parametrize("name", ["custom_fwd", "custom_bwd"])
def test_wrong_device_type(name: str) -> None:
    """A device type that is no string is accepted, or refused with other words than torch's."""
    errors = []
    for amp in (torch.amp, amp_core):
        with pytest.raises(ValueError, match="Expected `device_type`") as caught:
            getattr(amp, name)(device_type=3)
        errors.append(str(caught.value))
        with pytest.raises(TypeError):
            getattr(amp, name)()
    assert errors[0] == errors[1]


def cast(value: Any) -> Any:
    return amp_core._cast(value, "cpu", torch.bfloat16)


VALUES = [
    torch.ones(2),
    torch.ones(2, dtype=torch.float64),
    torch.ones(2, dtype=torch.int32),
    torch.ones(2, dtype=torch.complex64),
    torch.ones(2, dtype=torch.float16),
    "text",
    b"bytes",
    None,
    3,
    [torch.ones(2), (torch.ones(2), "x")],
    {"a": torch.ones(2), "b": [torch.ones(2)]},
    np.ones(2),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_cast_as_torch(value: Any) -> None:
    """A value that torch's _cast handles comes out otherwise."""
    theirs = torch.amp.autocast_mode._cast(value, "cpu", torch.bfloat16)
    flat, shape = torch.utils._pytree.tree_flatten(cast(value))
    flat_theirs, shape_theirs = torch.utils._pytree.tree_flatten(theirs)
    assert shape == shape_theirs
    for ours, other in zip(flat, flat_theirs, strict=True):
        assert type(ours) is type(other)
        assert getattr(ours, "dtype", None) == getattr(other, "dtype", None)


def test_cast_keeps_container_types() -> None:
    """Namedtuples fail, dataclasses are passed over, mappings become dicts, iterators run later."""
    with pytest.raises(TypeError):
        torch.amp.autocast_mode._cast(Pair(torch.ones(1), 2), "cpu", torch.bfloat16)
    value = Pair(torch.ones(1), collections.OrderedDict(a=Batch(torch.ones(1))))
    result = cast(value)
    assert isinstance(result, Pair)
    assert isinstance(result.second, collections.OrderedDict)
    assert result.first.dtype is result.second["a"].x.dtype is torch.bfloat16
    assert result.second["a"].size == 3
    assert value.second["a"].x.dtype is torch.float32

    consumed = []
    lazy = (consumed.append(t) or t for t in [torch.ones(1)])
    result = cast(lazy)
    assert len(consumed) == 1
    assert [t.dtype for t in result] == [torch.bfloat16]


OTHERS = [
    types.MappingProxyType({"x": torch.ones(1)}),
    collections.defaultdict(list, x=torch.ones(1)),
    collections.UserDict(x=torch.ones(1)),
    collections.deque([torch.ones(1)], maxlen=1),
]


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: type(value).__name__)
def test_cast_of_containers_that_are_made_otherwise(value: Any) -> None:
    """A read-only mapping cannot be copied; a default factory or the bound of a deque is lost."""
    result, key = cast(value), 0 if isinstance(value, collections.deque) else "x"
    assert type(result) is type(value)
    assert (result[key].dtype, value[key].dtype) == (torch.bfloat16, torch.float32)
    for what in ("default_factory", "maxlen"):
        assert getattr(result, what, None) is getattr(value, what, None)


class Output(collections.OrderedDict[str, object]):
    """A mapping whose items are assigned one by one, as the outputs of transformers and diffusers."""

    def update(self, *args: object, **kwargs: object) -> None:
        raise TypeError("items are assigned one by one")


def test_cast_of_a_mapping_without_update() -> None:
    """An output of transformers among the inputs stops the step with its own error."""
    value = Output()
    value["x"], value["size"] = torch.ones(1), 3
    result = cast(value)
    assert (type(result), result["x"].dtype, result["size"]) == (Output, torch.bfloat16, 3)
    assert value["x"].dtype is torch.float32


def test_cast_of_nested_tensors() -> None:
    """A nested tensor among the inputs is left in float32."""
    nested = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged)
    assert cast([nested, torch.ones(1)])[0].dtype is torch.bfloat16


def test_cast_lets_gradients_flow() -> None:
    """A cast of a tensor that requires grad cuts it off from the graph."""
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    cast([x, y])[0].sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


class HalfProduct(torch.autograd.Function):
    """A function with two inputs to cast."""

    @staticmethod
    @amp_core.custom_fwd(device_type="cpu", cast_inputs=torch.float16)
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    backward = staticmethod(Product.backward)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="Dynamo of torch 2.11 cannot trace custom_fwd")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it
def test_a_function_that_casts_several_inputs_compiles() -> None:
    """Dynamo looks into the kernel that casts them in one call, and refuses what it finds there."""

    def results(call: Callable[..., torch.Tensor]) -> list[Any]:
        torch.manual_seed(0)
        x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
        with amp_core.autocast("cpu"):
            out = call(x, w)
        out.sum().backward()
        return [out.detach(), x.grad, w.grad]

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: HalfProduct.apply(x, w) * 2, backend="aot_eager", fullgraph=True)
    expected = results(lambda x, w: HalfProduct.apply(x, w) * 2)
    torch.testing.assert_close(results(compiled), expected, rtol=0, atol=0)


class ByHand:
    """What a program passes as ``ctx`` when it calls the two halves of a function itself."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


@pytest.mark.parametrize("amp", [torch.amp, amp_core], ids=lambda amp: amp.__name__)
def test_a_ctx_made_by_hand(amp: Any) -> None:
    """A function whose halves a program calls itself, as reversible layers do, fails in its backward."""
    seen: list[Any] = []
    function, x = make(amp, None, False, seen), torch.ones(3, 3)
    for enabled in (True, False):
        ctx = ByHand()
        with torch.autocast("cpu", enabled=enabled):
            assert function.forward(ctx, x, x).dtype is (torch.bfloat16 if enabled else torch.float32)
        function.backward(ctx, x)
    assert seen == [(enabled, torch.bfloat16, torch.float32) for enabled in (True, False)]


@pytest.mark.parametrize("first", [None, 2, "2", [2], {"factor": 2}, Pair(1, 2), Batch(torch.ones(1))])
def test_a_first_input_that_takes_no_attributes(first: Any) -> None:
    """A function that has setup_context, or is no autograd function, refuses named inputs, or no tensors."""
    decorated = amp_core.custom_fwd(
        lambda first, x: (first, x @ x), device_type="cpu", cast_inputs=torch.float32
    )
    with amp_core.autocast("cpu"):
        assert decorated(first, torch.ones(2, 2))[1].dtype is torch.float32
        assert decorated(x=torch.ones(2, 2), first=first)[1].dtype is torch.float32


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="Dynamo of torch 2.11 cannot trace custom_fwd")
def test_a_function_that_is_no_autograd_function_compiles() -> None:
    """The first call of a plain function that is decorated breaks the graph, at a lock."""

    @amp_core.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    def function(x: torch.Tensor) -> torch.Tensor:
        with amp_core.autocast("cpu"):
            return product(x)

    torch._dynamo.reset()
    x = torch.rand(3, 3)
    result = torch.compile(function, backend="eager", fullgraph=True)(x)
    assert torch.equal(result, x @ x)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it
def test_the_first_call_of_a_function_with_setup_context_may_be_compiled() -> None:
    """Its backward finds no state: what carries it to setup_context is put in place at the first call."""
    function = make(amp_core, None, True, [])
    x = torch.rand(3, 3, requires_grad=True)

    def product(x: torch.Tensor) -> torch.Tensor:
        with amp_core.autocast("cpu"):
            return function.apply(x, x)

    torch._dynamo.reset()
    out = torch.compile(product, backend="eager")(x)
    out.sum().backward()
    assert out.dtype is torch.bfloat16
    assert x.grad is not None
