"""Matrix products of quantised operands: the rule of a `Recipe`.

The operands are cast to the region's dtype, as under ``lower_precision_fp``. Each of the three products of a
layer (output, gradient of the input, gradient of the weight) then quantises its own two operands along the
dimension that it sums over, and the backend multiplies them. Where it emulates, it dequantises them to the
recipe's ``accumulate`` and multiplies with torch's op in that dtype. A format's values times its scale are
exact or rounded once in float32; bfloat16 would round them again. So both ways have the same accuracy, up to
the order of the sum. Bias and factors are applied before the one rounding to the region's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_core._torch.dispatcher import Overload, autocast_key, dispatcher_name
from amp_core._torch.op_kernels import key_set
from amp_core._torch.tracing import calls_are_captured, functorch_is_at_work
from amp_core.dispatch import delayed_scales, kept_operands, products
from amp_core.dispatch.bilinear import Bilinear, bilinear, can_take_apart
from amp_core.dispatch.quantized_products import Call, product, watching
from amp_core.dispatch.work import work
from amp_core.errors import PolicyError
from amp_core.policy import rules as r
from amp_core.policy.recipes import RecipeRule


class _Op(NamedTuple):
    """How an op is composed: of which arguments, and the dimensions that each factor must have."""

    compose: Callable[..., Tensor]
    first: int = 0
    dims: int | None = None


_OPS = {
    "aten::linear": _Op(products.linear),
    "aten::matmul": _Op(products.matmul),
    "aten::mm": _Op(lambda product, a, b: product(a, b), dims=2),
    "aten::bmm": _Op(lambda product, a, b: product(a, b), dims=3),
    "aten::addmm": _Op(products.plus, first=1, dims=2),
    "aten::baddbmm": _Op(products.plus, first=1, dims=3),
}
_TWO_FACTORS = _Op(products.matmul)
"""The places of the factors in ops that `bilinear` takes apart."""


def scaled(
    op: Overload, rule: RecipeRule, call: Callable[..., Any], cast: Callable[..., Any], device_type: str
) -> Callable[..., Any]:
    """Return the runner of `op` under `rule`.

    Args:
        op: one of `OPS` or `BILINEAR` in `amp_core.policy.recipes`.
        rule: the recipe, perhaps with a threshold.
        call: runs the op itself: small calls, float32 regions, and arguments that it has to refuse.
        cast: a runner that returns the arguments and keyword arguments, cast to the region's dtype.
        device_type: the region's device type.
    """
    keys, limit = key_set(autocast_key(device_type)), r.threshold(rule)
    name = dispatcher_name(op)
    takes_apart = name not in _OPS
    shape: _Op = _OPS.get(name, _TWO_FACTORS)
    first = shape.first

    def run(keyset: Any, given: Any, kwargs: Any) -> Any:
        args, kwargs = cast(keyset, given, kwargs)
        low = torch.get_autocast_dtype(device_type)
        small = limit is not None and work(op, args, kwargs) <= limit
        factors = args[first], args[first + 1]
        fit = can_take_apart(op, args, kwargs) if takes_apart else _can_multiply(name, *factors, args)
        if small or not (fit and _are_low(args, low)):
            return call(*args, **kwargs)
        _check(name, rule, args)
        histories = delayed_scales.histories(rule.recipe, given[first + 1])
        shared = Call(rule, keys, watching(), _kept(*factors), histories)
        if takes_apart:
            return _bilinear(shared, factors, bilinear(op, call, args, kwargs), low)
        return shape.compose(lambda a, b: product(a, b, shared), *args, **kwargs).to(low)

    return run


def _bilinear(shared: Call, factors: tuple[Tensor, Tensor], op: Bilinear, low: torch.dtype) -> Tensor:
    result = product(*factors, shared, op)
    return (result if op.bias is None else result + op.bias).to(op.dtype or low)


def _kept(a: Tensor, b: Tensor) -> dict[str, kept_operands.Forms]:
    """Return, by role, the quantised forms of factors that a scope keeps."""
    if calls_are_captured():  # they would be constants of a graph
        return {}
    forms = {"input": kept_operands.forms_of(a), "weight": kept_operands.forms_of(b)}
    return {role: kept for role, kept in forms.items() if kept is not None}


def _are_low(args: Any, low: torch.dtype) -> bool:
    """Return whether all tensors but the offsets of groups have the region's dtype, which is not float32."""
    dtypes = {t.dtype for t in args if isinstance(t, Tensor)} - {torch.int32}
    return low is not torch.float32 and dtypes == {low}


def _can_multiply(name: str, a: Tensor, b: Tensor, args: Any) -> bool:
    """Return whether the factors among `args` have dimensions, and those match."""
    if 0 in (a.dim(), b.dim()):
        return False
    if name == "aten::linear":
        is_matrix = b.dim() == 2 or (b.dim() == 1 and all(each is None for each in args[2:]))
        return bool(is_matrix and a.shape[-1] == b.shape[-1])
    dims = _OPS[name].dims
    if dims is not None and not a.dim() == b.dim() == dims:
        return False
    batches = zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False)
    fit = all(x == y or (dims is None and 1 in (x, y)) for x, y in batches)
    return bool(fit and a.shape[-1] == b.shape[-min(b.dim(), 2)])


def _check(name: str, rule: RecipeRule, args: Any) -> None:
    if any(t.layout is not torch.strided or t.is_nested for t in args if isinstance(t, Tensor)):
        raise PolicyError(
            f"{name} has the rule {str(rule)!r}, but sparse and nested tensors cannot be quantised. Give it "
            f"another rule, such as 'lower_precision_fp', by OpPolicy.override or apply_policy."
        )
    if torch.jit.is_tracing():  # type: ignore[no-untyped-call]
        raise PolicyError(
            f"{name} has the rule {str(rule)!r}, but torch.jit.trace cannot record how operands are "
            f"quantised. Give it another rule, such as 'lower_precision_fp', or use torch.compile."
        )
    refuse_transforms()


def refuse_transforms() -> None:
    """Raise if ``torch.func`` is transforming what runs now.

    Raises:
        PolicyError: it is.
    """
    if functorch_is_at_work():
        raise PolicyError(
            "A policy with recipes is in force in a transform of torch.func, which takes ops apart before "
            "their rules apply and knows no derivative of quantised products. Transform the function in a "
            "region whose policy has no recipe, or use torch.autograd."
        )


def guarded(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a runner like `run` that refuses transforms."""

    def guard(keyset: Any, args: Any, kwargs: Any) -> Any:
        refuse_transforms()
        return run(keyset, args, kwargs)

    return guard
