"""Keep weights quantised, beside the casts that a scope keeps of them.

They live on the cast and are dropped with it, so they are stale exactly when it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:  # scopes are used without recipes too
    from amp_core.formats import Quantization, Quantized

_ATTRIBUTE = "_amp_core_quantized"


class _Form(NamedTuple):
    packed: Quantized
    strides: tuple[int, ...]
    """Of the values: torch sums a product in an order that depends on the layout of its factors."""


Forms = dict[tuple[Any, ...], _Form]
"""The quantised forms of one cast, by quantisation, dimension and view of the cast."""


def begin(cast: Tensor) -> None:
    """Let the quantised forms of `cast` be kept from now on."""
    if not hasattr(cast, _ATTRIBUTE):
        setattr(cast, _ATTRIBUTE, {})


def end(cast: Tensor) -> None:
    """Drop the quantised forms of `cast`."""
    if hasattr(cast, _ATTRIBUTE):
        delattr(cast, _ATTRIBUTE)


def forms_of(cast: Tensor) -> Forms | None:
    """Return what is kept of `cast`; None if no scope keeps it."""
    forms: Forms | None = getattr(cast, _ATTRIBUTE, None)
    return forms


def nbytes(cast: Tensor) -> int:
    """Return the bytes of the quantised forms of `cast`."""
    return sum(form.packed.nbytes() for form in [*(forms_of(cast) or {}).values()])


def quantized(
    forms: Forms,
    tensor: Tensor,
    how: Quantization,
    dim: int,
    make: Callable[[], Quantized],
    *,
    packed: bool,
) -> Quantized:
    """Return what `make` returns, from `forms` if it is there.

    Args:
        forms: of the cast that `tensor` is a view of.
        tensor: the operand.
        how: its quantisation; stochastic rounding draws anew each time and is not kept.
        dim: the contracted dimension.
        make: quantises `tensor`, to the bits of the formats if `packed`.
        packed: whether the result has the bits of the formats, not float32 values.
    """
    if how.rounding == "stochastic":
        return make()
    key = how, dim, tensor.shape, tensor.stride()
    form = forms.get(key)
    if form is not None:
        return form.packed if packed else _unpacked(form)
    with torch.inference_mode(False):  # a training step may use what inference has made
        made = make()
        forms[key] = _Form(made.packed(), made.values.stride())
    return made


def _unpacked(form: _Form) -> Quantized:
    from amp_core.formats.packing import unpack

    packed = form.packed
    values = unpack(packed.values, packed.quantization.element, (1, *packed.shape)[-1])
    if values.stride() != form.strides:
        values = values.new_empty_strided(values.shape, form.strides).copy_(values)
    return replace(packed, values=values, scale=packed.scale.to(torch.float32), is_packed=False)
