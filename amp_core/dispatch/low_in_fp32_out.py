"""The rule ``low_in_fp32_out``: round the inputs to the region's dtype, return float32.

Portable form: the rounded inputs are widened to float32 and the op runs in float32. A product of two bfloat16
or float16 numbers is exact in float32, so this is the op with float32 accumulation: bit for bit the float32
op on rounded inputs. Its gradients are rounded to the region's dtype once, on their way back.

Devices whose matrix products take an ``out_dtype`` (``mm.dtype``, ``bmm.dtype``) multiply the rounded inputs
themselves: the same products, summed in the order of that kernel. torch has no derivative for those ops;
`_Product` adds it. It rounds the incoming gradient to the low dtype before it multiplies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_core._torch.dispatcher import Overload
from amp_core._torch.op_kernels import has_kernel
from amp_core.dispatch import products

Composed = Callable[..., "Tensor | None"]
"""Computes an op from products with float32 results; None if its arguments do not suit."""


def composed(op: Overload, device_type: str) -> Composed | None:
    """Return how to compute `op` with the device's own float32-out products; None if it has none."""
    if not all(has_kernel(f"aten::{name}.dtype", device_type.upper()) for name in ("mm", "bmm")):
        return None
    return _COMPOSED.get(str(op))


class _Product(torch.autograd.Function):
    """``mm`` or ``bmm`` of two low-precision tensors, with a float32 result and low-precision gradients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        product = torch.mm if a.dim() == 2 else torch.bmm
        return product(a, b, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        low = grad.to(a.dtype)
        needs_a, needs_b = ctx.needs_input_grad
        return (low @ b.mT if needs_a else None, a.mT @ low if needs_b else None)


def _product(a: Tensor, b: Tensor) -> Tensor:
    result: Tensor = _Product.apply(a, b)  # type: ignore[no-untyped-call]
    return result


def _matmul(a: Tensor, b: Tensor) -> Tensor | None:
    plain = a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0]
    return products.matmul(_product, a, b) if plain or (a.dim() >= 2 and b.dim() == 2) else None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    simple = x.dim() >= 2 and weight.dim() == 2
    return products.linear(_product, x, weight, bias) if simple else None


_plus = functools.partial(products.plus, _product)


_COMPOSED: dict[str, Composed] = {
    "aten.mm.default": _product,
    "aten.bmm.default": _product,
    "aten.linear.default": _linear,
    "aten.matmul.default": _matmul,
    "aten.addmm.default": _plus,
    "aten.baddbmm.default": _plus,
}
