"""Convolutions and grouped products: ops that are linear in each of two factors, one scale per tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_core._torch.dispatcher import Overload, arguments

Compute = Callable[[Tensor, Tensor], Tensor]


class Bilinear(NamedTuple):
    """One call.

    Attributes:
        compute: the op on its two factors, without a bias.
        bias: what is added to the result, of a shape that broadcasts; or None.
        dtype: of the result, if the call gives one.
    """

    compute: Compute
    bias: Tensor | None
    dtype: torch.dtype | None

    def of_first(self, like: Tensor) -> Compute:
        """Return (gradient of the result, second factor) -> gradient of the first factor, as `like`."""
        return lambda grad, other: _gradient(lambda x: self.compute(x, other), like, grad)

    def of_second(self, like: Tensor) -> Compute:
        """Return (first factor, gradient of the result) -> gradient of the second factor, as `like`."""
        return lambda other, grad: _gradient(lambda x: self.compute(other, x), like, grad)


def bilinear(
    op: Overload, call: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Bilinear:
    """Take a call of `op` apart; `call` runs it."""
    names = [argument.name for argument in arguments(op)]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rest = {name: value for name, value in given.items() if name not in (*names[:2], "bias", "out_dtype")}
    bias, dtype = given.get("bias"), given.get("out_dtype")
    if bias is not None and "weight" in names:  # of a convolution: one element per channel
        bias = bias.view(-1, *[1] * (given["weight"].dim() - 2))

    def compute(a: Tensor, b: Tensor) -> Tensor:
        values = {names[0]: a, names[1]: b, "bias": None, **rest}
        return call(*(values[name] for name in names if name in values))

    return Bilinear(compute, bias, dtype)


def _gradient(of: Callable[[Tensor], Tensor], like: Tensor, grad: Tensor) -> Tensor:
    with torch.enable_grad():
        point = torch.zeros_like(like, dtype=grad.dtype, requires_grad=True)  # of a linear function: any
        (result,) = torch.autograd.grad(of(point), point, grad)
    return result
