"""Ops that are one matrix product, made of a function that multiplies matrices or equal batches of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]
"""(a, b) -> their product: both have two dimensions, or both have three and the same first one."""


def matmul(product: Product, a: Tensor, b: Tensor) -> Tensor:
    """Compute ``torch.matmul``: vectors, matrices, and batches that broadcast."""
    if a.dim() == 1:
        return matmul(product, a.unsqueeze(0), b).squeeze(-2 if b.dim() > 1 else 0)
    if b.dim() == 1:
        return matmul(product, a, b.unsqueeze(-1)).squeeze(-1)
    if b.dim() == 2:
        rows = product(a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b)
        return rows.view(*a.shape[:-1], b.shape[-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    left, right = (t.expand(*batch, *t.shape[-2:]).reshape(math.prod(batch), *t.shape[-2:]) for t in (a, b))
    return product(left, right).view(*batch, a.shape[-2], b.shape[-1])


def linear(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``torch.nn.functional.linear``."""
    result = matmul(product, x, weight.t())
    return result if bias is None else result + bias.expand(result.shape)


def plus(product: Product, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Compute ``torch.addmm`` or ``torch.baddbmm``."""
    result = product(a, b) if alpha == 1 else product(a, b) * alpha
    bias = bias.expand(result.shape)
    if beta == 0:  # inf and NaN do not count, and the gradient is zeros
        return torch.where(torch.zeros((), dtype=torch.bool, device=bias.device), bias, result)
    return result + bias if beta == 1 else torch.add(result, bias, alpha=beta)
