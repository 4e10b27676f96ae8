"""Estimate the work of an op from the shapes of its arguments, for rules with a threshold."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_core._torch.dispatcher import Overload, arguments, dispatcher_name, short_name
from amp_core.common.containers import tensors_in

_FACTORS = (
    ("self", "other"),
    ("mat1", "mat2"),
    ("batch1", "batch2"),
    ("self", "mat2"),
    ("self", "tensor"),
    ("mat", "vec"),  # before the next: the `self` of addmv is no factor
    ("self", "vec"),
)

_PRODUCTS = ("mm", "bmm", "matmul", "mv", "dot", "vdot", "addmm", "baddbmm", "addbmm", "addmv")
_KINDS = {
    **dict.fromkeys(_PRODUCTS, "product"),
    "linear": "linear",
    "_grouped_mm": "grouped",
    "scaled_dot_product_attention": "attention",
}


def work(op: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the floating-point operations of a call, estimated from its shapes.

    Matrix products, convolutions and attention count two per multiplication; other ops count one per element
    of their largest tensor. A call that the op refuses has no work.
    """
    try:
        return _work(op, args, kwargs)
    except (IndexError, ValueError, ZeroDivisionError):
        return 0
    except RuntimeError:  # strided nested tensors have no sizes
        if not any(isinstance(v, Tensor) and v.is_nested for v in (*args, *kwargs.values())):
            raise
        return _of_nested(op, args, kwargs)


@torch.no_grad()
def _of_nested(op: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Sum the work of the calls that one on nested tensors stands for."""
    given = [*args, *kwargs.values()]
    each = [v.unbind() if isinstance(v, Tensor) and v.is_nested else itertools.repeat(v) for v in given]
    count = len(args)
    calls = zip(*each, strict=False)
    return sum(work(op, call[:count], dict(zip(kwargs, call[count:], strict=True))) for call in calls)


def _work(op: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    kind, names = _kind(op)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if kind == "product":
        left, right = next((given[a], given[b]) for a, b in _FACTORS if a in given and b in given)
        return _product(left, right)
    if kind == "linear":
        rows, weight = _tensors(given, "input", "weight")
        return 2 * rows.numel() * (weight.shape[0] if weight.dim() > 1 else 1)
    if kind == "grouped":
        left, right = _tensors(given, "self", "mat2")
        return 2 * min(left.numel() * right.shape[-1], right.numel() * left.shape[-2])
    if kind == "convolution":
        return _convolution("transpose" in dispatcher_name(op), **given)
    if kind == "attention":
        query, key, value = _tensors(given, "query", "key", "value")
        per_row = key.shape[-2] * (query.shape[-1] + value.shape[-1])
        return 2 * math.prod(query.shape[:-1]) * per_row
    return max((t.numel() for t in tensors_in((args, kwargs))), default=0)


def _tensors(given: Mapping[str, Any], *names: str) -> list[Tensor]:
    return [given[name] for name in names]


@functools.cache
def _kind(op: Overload) -> tuple[str, tuple[str, ...]]:
    """Return how the work of `op` is counted, and the names of its arguments."""
    name = short_name(op)
    names = tuple(argument.name for argument in arguments(op))
    if "conv" in name and {"input", "weight"} <= {*names} and name != "conv_tbc":
        return "convolution", names
    return _KINDS.get(name, ""), names


def _product(left: Tensor, right: Tensor) -> int:
    """Count ``left @ right``, whose batch dimensions may broadcast."""
    columns = _size(right, -1) if right.dim() > 1 else 1
    rows = _size(left, -2) if left.dim() > 1 else 1
    return 2 * max(left.numel() * columns, right.numel() * rows)


def _size(tensor: Tensor, dim: int) -> int:
    """Return a size; 0 for the ragged one of a jagged tensor, as the other factor then tells the work."""
    size = tensor.shape[dim]
    return size if isinstance(size, int) or not tensor.is_nested else 0


def _convolution(
    transpose: bool,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    transposed: bool = False,
    **_: Any,
) -> int:
    """Count a convolution: each position of its output (its input, if transposed) uses each weight once."""
    spatial = weight.dim() - 2
    batch = input.shape[0] if input.dim() > spatial + 1 else 1
    sizes = input.shape[-spatial:]
    if transpose or transposed:
        return 2 * batch * math.prod(sizes) * weight.numel()
    same = padding == "same"
    pads = [0] * spatial if isinstance(padding, str) else _each(padding, spatial)
    parts = zip(sizes, weight.shape[2:], _each(stride, spatial), pads, _each(dilation, spatial), strict=True)
    positions = [n if same else (n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in parts]
    return 2 * batch * math.prod(positions) * weight.numel()


def _each(value: Any, spatial: int) -> list[int]:
    values = [value] if isinstance(value, int) else [*value]
    return values * spatial if len(values) == 1 else values
