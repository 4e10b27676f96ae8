"""Quantise a tensor with PyTorch operations, on every device, without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from amp_core._torch.tensors import part_of
from amp_core.common.arguments import as_whole, check_dtype
from amp_core.common.text import counted
from amp_core.formats.elementwise import count_nonfinite
from amp_core.formats.groups import Groups, largest
from amp_core.formats.hadamard import rotate, rotate_back
from amp_core.formats.packing import pack, pack_scale, unpack
from amp_core.formats.passes import Passes, PortablePasses, Rounding
from amp_core.formats.quantization import Delayed, Quantization
from amp_core.formats.scales import may_saturate

COUNTS = ("inf", "nan", "saturated", "flushed")
"""What the elements of `Quantized.counts` count."""


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantised tensor: ``values * scale`` stands for it.

    Attributes:
        values: float32 values that the element format represents; or its storage, after `packed`. The
            shape is the tensor's; a Hadamard transform pads the contracted dimension to whole blocks.
        scale: float32, or its format after `packed`. 0-dim per tensor; size 1 in the contracted dimension
            per row; else one element per block or tile.
        tensor_scale: 0-dim float32, the second scale of ``"e4m3"``; None for other formats of scales.
        amax: float32, of the shape of `scale`: the largest magnitude in each group.
        counts: int64 of shape ``(4,)``, on the device: the elements of the tensor that are inf, that are
            NaN, finite ones whose rounded magnitude was above the largest value and was reduced to it, and
            ones other than 0 that became 0. A group with inf or NaN has the scale NaN.
        quantization: how.
        dim: the contracted dimension.
        shape: the shape of the tensor.
        is_packed: whether `values` and `scale` are in the bits of their formats.
    """

    values: Tensor
    scale: Tensor
    tensor_scale: Tensor | None
    amax: Tensor
    counts: Tensor
    quantization: Quantization
    dim: int
    shape: torch.Size
    is_packed: bool = False

    def dequantize(self, dtype: torch.dtype = torch.float32, *, rotated: bool = False) -> Tensor:
        """Return the tensor that this stands for.

        Args:
            dtype: of the result.
            rotated: leave out the inverse of the Hadamard transform, so that the result has the shape of
                `values`. Products of two such tensors are those of the tensors themselves.

        Raises:
            TypeError: `dtype` is no dtype.
        """
        check_dtype(dtype, "dtype")
        hadamard = self.quantization.hadamard
        shape = self._rotated_shape
        values = (
            unpack(self.values, self.quantization.element, (1, *shape)[-1]) if self.is_packed else self.values
        )
        groups = Groups(shape, self.quantization.granularity, self.dim)
        scale = self.scale.to(torch.float32)
        if self.tensor_scale is not None:
            scale = scale * self.tensor_scale
        result = groups.join(groups.split(values) * groups.inward(scale))
        if hadamard is not None and not rotated:
            result = rotate_back(result, hadamard, self.dim, self.shape[self.dim])
        return result.to(dtype)

    def packed(self) -> Quantized:
        """Return this in the bits of its formats.

        fp8 has torch's dtype. Other formats are codes in uint8: e2m1 two to a byte along the last dimension,
        the first in the low half; the others one to a byte. Scales are float8_e8m0fnu, float8_e4m3fn or
        float32.
        """
        if self.is_packed:
            return self
        values = pack(self.values, self.quantization.element)
        return replace(
            self, values=values, scale=pack_scale(self.scale, self.quantization.scale), is_packed=True
        )

    def nbytes(self) -> int:
        """Return the bytes of values and scales; of DTensors, of this rank's parts."""
        tensors = (self.values, self.scale, self.tensor_scale)
        return sum(part_of(t).nbytes for t in tensors if t is not None)

    @property
    def _rotated_shape(self) -> torch.Size:
        if self.quantization.hadamard is None:
            return self.shape
        shape = list(self.shape)
        shape[self.dim] += -shape[self.dim] % self.quantization.hadamard
        return torch.Size(shape)


def quantize(
    tensor: Tensor,
    quantization: Quantization,
    dim: int = -1,
    *,
    seed: int | Tensor | None = None,
    amax: Tensor | None = None,
) -> Quantized:
    """Quantise `tensor`, rounded to float32, computing in float32. Not differentiable.

    Zeros stay zeros. The elements that share a scale are a group. With inf or NaN among them, the scale is
    NaN, also where `amax` is given: everything that is computed from it is NaN, and a loss scaler skips the
    step.

    Args:
        tensor: floating-point; of any shape, memory layout and number of elements.
        quantization: formats, granularity and rounding.
        dim: the dimension that the matrix product contracts.
        seed: of stochastic rounding: any int, modulo 2^64. The same seed gives the same bits on every device.
            In a graph, a 0-dim int64 tensor of 64 random bits, so that each call can draw its own.
        amax: what scales are found from in place of the tensor's own largest magnitudes: 0-dim for
            ``"tensor"`` and for e4m3 scales, where it is that of the tensor; else of the shape of
            `Quantized.scale`. Where it is not above zero (0, negative, NaN), the tensor's own is used.

    Raises:
        TypeError: `tensor` is not a floating-point tensor, `quantization` not a `Quantization`, `dim` not an
            integer, or `amax` or `seed` neither of what they may be.
        ValueError: stochastic rounding without a seed, a delayed scale without `amax`, `amax` of another
            shape, or `tensor` is 0-dim and has no rows.
        IndexError: `tensor` has no dimension `dim`.

    Example::

        from amp_core.formats import quantize

        quantized = quantize(torch.randn(4, 100), Recipe.mxfp8().input)
        assert quantized.values.shape == (4, 100) and quantized.scale.shape == (4, 4)
        near = quantized.dequantize()
    """
    return quantize_by(PortablePasses(), tensor, quantization, dim, seed=seed, amax=amax)


@torch.no_grad()
def quantize_by(
    passes: Passes,
    tensor: Tensor,
    quantization: Quantization,
    dim: int,
    *,
    seed: int | Tensor | None,
    amax: Tensor | None,
    packed: bool = False,
) -> Quantized:
    """Quantise as `quantize` does, with other passes over the elements.

    Args:
        passes: what reads and writes the elements.
        tensor: see `quantize`, as for the arguments that follow.
        quantization: formats, granularity and rounding.
        dim: the dimension that the matrix product contracts.
        seed: of stochastic rounding.
        amax: what scales are found from.
        packed: return the result as `Quantized.packed` would.
    """
    _check_numbers(dim, seed, amax)
    _check(tensor, quantization, dim, seed)
    if isinstance(quantization.found, Delayed) and amax is None:
        raise ValueError(
            "The quantization has a delayed scale: pass quantize(..., amax=history.amax) with an "
            "amp_core.formats.AmaxHistory, or use found='current'."
        )
    x = tensor.detach()
    before = None
    if quantization.hadamard is not None:
        x = x.to(torch.float32)
        before = count_nonfinite(x)
        x = rotate(x, quantization.hadamard, dim)
    x = passes.prepare(x)
    groups = Groups(x.shape, quantization.granularity, dim)
    own, nonfinite = passes.largest(x, groups)
    found = _found(own, amax, groups, quantization)
    of_tensor = _of_tensor(found, amax, quantization)
    scales = passes.scales(own, found, quantization.element, quantization.scale, of_tensor, packed=packed)
    stochastic = seed if quantization.rounding == "stochastic" else None
    beyond = amax is not None or may_saturate(quantization.element, quantization.scale)
    rounding = Rounding(quantization.element, stochastic, amax is not None, beyond, packed)
    values, outside = passes.round(x, groups, scales.encode, rounding)
    return Quantized(
        values=values,
        scale=groups.outward(scales.scale),
        tensor_scale=scales.tensor_scale,
        amax=groups.outward(own),
        counts=torch.cat([nonfinite if before is None else before, outside]),
        quantization=quantization,
        dim=dim,
        shape=tensor.shape,
        is_packed=packed,
    )


def _check_numbers(dim: object, seed: object, amax: object) -> None:
    as_whole(dim, "dim")
    if isinstance(seed, Tensor):
        if seed.dim() or seed.dtype is not torch.int64:
            raise TypeError(
                f"seed= must be an int or a 0-dim int64 tensor, not a tensor of {seed.dtype} and the shape "
                f"{tuple(seed.shape)}."
            )
    elif seed is not None:
        as_whole(seed, "seed")
    if amax is not None and not isinstance(amax, Tensor):
        raise TypeError(f"amax= must be a tensor, such as torch.tensor(448.0) or history.amax, not {amax!r}.")


def _check(tensor: Tensor, quantization: Quantization, dim: int, seed: int | Tensor | None) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"quantize takes a tensor, got {type(tensor).__name__}.")
    if not isinstance(quantization, Quantization):
        raise TypeError(
            f"quantize takes the Quantization of one role, such as Recipe.mxfp8().input, got "
            f"{type(quantization).__name__}."
        )
    if not tensor.is_floating_point():
        raise TypeError(f"quantize takes floating-point tensors, not {tensor.dtype}.")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError("quantize takes dense tensors: groups of a sparse or nested one have no common size.")
    if quantization.rounding == "stochastic" and seed is None:
        raise ValueError("Stochastic rounding needs a seed: pass quantize(..., seed=).")
    if tensor.dim() == 0 and (quantization.granularity != "tensor" or quantization.hadamard is not None):
        raise ValueError(
            f"A 0-dim tensor has no {quantization.granularity!r} to share a scale; "
            f"use the granularity 'tensor' or a tensor with dimensions."
        )
    if not -max(tensor.dim(), 1) <= dim < max(tensor.dim(), 1):
        raise IndexError(f"The tensor has {counted(tensor.dim(), 'dimension')}; dim={dim} is none of them.")


def _found(own: Tensor, amax: Tensor | None, groups: Groups, quantization: Quantization) -> Tensor:
    """Return the largest magnitudes from which the scales of groups follow."""
    if amax is None or quantization.scale == "e4m3":
        return own
    shape = groups.outward(own).shape
    if amax.shape != shape and not amax.numel() == shape.numel() == 1:
        raise ValueError(
            f"amax has {counted(amax.numel(), 'element')}; the scales are of shape {tuple(shape)}, and amax "
            f"is of {tuple(amax.shape)}."
        )
    given = groups.inward(amax.to(torch.float32).view(shape))
    return torch.where(given > 0, given, own)


def _of_tensor(own: Tensor, amax: Tensor | None, quantization: Quantization) -> Tensor:
    """Return the largest magnitude from which the second scale of e4m3 follows."""
    if quantization.scale != "e4m3":
        return own
    whole = largest(own)
    if amax is None:
        return whole
    if amax.numel() != 1:
        raise ValueError(
            f"amax has {counted(amax.numel(), 'element')}; for e4m3 scales it is that of the tensor: one."
        )
    given = amax.to(torch.float32).view(())
    return torch.where((given > 0) & whole.isfinite(), given, whole)
