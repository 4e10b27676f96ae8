"""Convolutions and grouped products: ops that are linear in each of two factors, one scale per tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_core._torch.autocast import torch_autocast
from amp_core._torch.dispatcher import Overload, arguments, by_name, dispatcher_name
from amp_core._torch.tracing import calls_are_captured, is_fake
from amp_core.policy import names

Compute = Callable[[Tensor, Tensor], Tensor]


class Bilinear(NamedTuple):
    """One call.

    Attributes:
        compute: the op on its two factors, without a bias.
        gradient: (name of the product, its two factors, what the gradient is of) -> the gradient.
        bias: what is added to the result, of a shape that broadcasts; or None.
        dtype: of the result, if the call gives one.
    """

    compute: Compute
    gradient: Callable[[str, Tensor, Tensor, Tensor], Tensor]
    bias: Tensor | None
    dtype: torch.dtype | None

    def of_first(self, like: Tensor) -> Compute:
        """Return (gradient of the result, second factor) -> gradient of the first factor, as `like`."""
        return lambda grad, other: self.gradient("grad_input", grad, other, like)

    def of_second(self, like: Tensor) -> Compute:
        """Return (first factor, gradient of the result) -> gradient of the second factor, as `like`."""
        return lambda other, grad: self.gradient("grad_weight", other, grad, like)


def _channels(op: Overload, given: Mapping[str, Any]) -> int:
    """Return how many channels the result of a convolution has."""
    weight: Tensor = given["weight"]
    groups: int = given.get("groups", 1)
    return weight.shape[1] * groups if "transpose" in dispatcher_name(op) else weight.shape[0]


def can_take_apart(op: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether both factors have more than one dimension, and a bias fits; else torch refuses it."""
    given = by_name(op, args, kwargs)
    if min(factor.dim() for factor in args[:2]) < 2:
        return False
    bias = given.get("bias")
    return bias is None or ("weight" in given and bias.shape == (_channels(op, given),))


def bilinear(
    op: Overload, call: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Bilinear:
    """Take a call of `op` apart; `call` runs it."""
    takes = [argument.name for argument in arguments(op)]
    given = by_name(op, args, kwargs)
    rest = {name: value for name, value in given.items() if name not in (*takes[:2], "bias", "out_dtype")}
    bias, dtype = given.get("bias"), given.get("out_dtype")
    if bias is not None:  # of a convolution: one element per channel
        bias = bias.view(_channels(op, given), *[1] * (given["weight"].dim() - 2))

    def compute(a: Tensor, b: Tensor) -> Tensor:
        values = {takes[0]: a, takes[1]: b, "bias": None, **rest}
        return call(*(values[name] for name in takes if name in values))

    grouped = dispatcher_name(op) == "aten::_grouped_mm"
    if grouped and (calls_are_captured() or any(map(is_fake, args[:2]))):
        return _in_graph(given.get("offs"), dtype)
    return Bilinear(compute, functools.partial(_either, compute), bias, dtype)


def _either(compute: Compute, product: str, a: Tensor, b: Tensor, like: Tensor) -> Tensor:
    if product == "grad_input":
        return _gradient(lambda x: compute(x, b), like, a)
    return _gradient(lambda x: compute(a, x), like, b)


def _gradient(of: Callable[[Tensor], Tensor], like: Tensor, grad: Tensor) -> Tensor:
    with torch.enable_grad():
        point = torch.zeros_like(like, dtype=grad.dtype, requires_grad=True)  # of a linear function: any
        (result,) = torch.autograd.grad(of(point), point, grad)
    return result


# ---- grouped products in graphs: torch 2.13 knows the shape of bfloat16 ones only ---------------------


def _in_graph(offsets: Tensor | None, dtype: torch.dtype | None) -> Bilinear:
    def compute(a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = _grouped(a, b, offsets)
        return result

    def gradient(product: str, a: Tensor, b: Tensor, _like: Tensor) -> Tensor:
        return compute(a, b.mT) if product == "grad_input" else compute(a.mT, b)

    return Bilinear(compute, gradient, None, dtype)


@torch.library.custom_op("amp_core::grouped_mm", mutates_args=())
def _grouped(a: Tensor, b: Tensor, offsets: Tensor | None) -> Tensor:
    """Return ``_grouped_mm`` in the dtype of the factors."""
    with torch_autocast(a.device.type, enabled=False):
        op = names.find("aten::_grouped_mm.default")
        assert op is not None
        result: Tensor = op(a, b, offs=offsets)
        return result.contiguous()


@_grouped.register_fake
def _(a: Tensor, b: Tensor, offsets: Tensor | None) -> Tensor:
    if a.dim() == b.dim() == 3:
        groups = [a.shape[0]]
    else:
        groups = [offsets.shape[0]] if offsets is not None and a.dim() == b.dim() else []
    return a.new_empty([*groups, a.shape[-2], b.shape[-1]])
