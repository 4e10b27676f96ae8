"""Products of quantised matrices by ``torch.nn.functional.scaled_mm``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from amp_core.formats import E2M1, Quantization, Quantized
from amp_core.formats.packing import pack, unpack
from amp_core.kernels.scaled import ScaledProducts

_CONTRACTED, _OUTER = 32, 16
"""The sizes that matrices are padded to multiples of: blocks of 32, and what CUDA's libraries ask for."""


def kind_of(how: Quantization) -> str:
    """Return which operand of ``scaled_mm`` this is: tensor, row, mxfp8 or nvfp4; empty if none."""
    if how.element.is_torchs and how.granularity in ("tensor", "row") and how.scale != "e4m3":
        return str(how.granularity)
    if how.element.is_torchs and how.granularity == 32 and how.scale.startswith("e8m0"):
        return "mxfp8"
    if how.element == E2M1 and how.granularity in (16, (16, 16)) and how.scale == "e4m3":
        return "nvfp4"
    return ""


class TorchScaledProducts(ScaledProducts):
    """What ``scaled_mm`` multiplies: pairs of one kind, summed in float32. The device may have fewer."""

    def lacks(self, kind: str, a: Quantization, b: Quantization) -> str:  # noqa: ARG002
        """Return why the device has no products of this kind; empty if it has them."""
        return ""

    def why_emulated(
        self, a: Quantization, b: Quantization, accumulate: torch.dtype, *, batched: bool = False
    ) -> str:
        kind, other = kind_of(a), kind_of(b)
        if not kind or kind != other:
            return "torch's scaled_mm takes no such pair of formats"
        if a.hadamard != b.hadamard:
            return "only one operand is transformed"
        if accumulate is not torch.float32:
            return f"torch's scaled_mm sums in float32, not {accumulate}"
        if batched:
            return "torch's scaled_mm takes no batches of matrices"
        return self.lacks(kind, a, b)

    def multiply(self, a: Quantized | Tensor, b: Quantized | Tensor, accumulate: torch.dtype) -> Tensor:
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return super().multiply(a, b, accumulate)
        batched = len(a.shape) != 2
        empty = 0 in (*a.values.shape, *b.values.shape)
        if empty or self.why_emulated(a.quantization, b.quantization, accumulate, batched=batched):
            return super().multiply(a, b, accumulate)
        return _multiply(a.packed(), b.packed())


def _multiply(a: Quantized, b: Quantized) -> Tensor:
    kind = kind_of(a.quantization)
    left, right = _values(a), _values(b)  # both with the contracted dimension last
    of_a, of_b = _scales(a, kind), _scales(b, kind)
    scaling, swizzle = functional.ScalingType, functional.SwizzleType
    kinds = {
        "tensor": [scaling.TensorWise],
        "row": [scaling.RowWise],
        "mxfp8": [scaling.BlockWise1x32],
        "nvfp4": [scaling.BlockWise1x16, scaling.TensorWise],
    }[kind]
    first = swizzle.NO_SWIZZLE if kind in ("tensor", "row") else swizzle.SWIZZLE_32_4_4
    order = [first, *[swizzle.NO_SWIZZLE for _ in kinds[1:]]]
    if kind == "row":
        of_b = [of_b[0].t()]
    result: Tensor = functional.scaled_mm(
        *(left, right.t(), of_a, kinds, of_b, kinds, order, order), output_dtype=torch.float32
    )
    return result[: _rows(a), : _rows(b)]


def _rows(operand: Quantized) -> int:
    """Return the size of the dimension that is not contracted."""
    return operand.shape[0 if operand.dim == -1 else 1]


def _values(operand: Quantized) -> Tensor:
    """Return the packed values as rows along the contracted dimension, padded with zeros."""
    values, element = operand.values, operand.quantization.element
    if element != E2M1:
        rows = (values if operand.dim == -1 else values.mT).view(torch.uint8)
        return _padded(rows, _OUTER, _CONTRACTED).view(values.dtype)
    if operand.dim != -1:  # pairs lie along the other dimension
        values = pack(unpack(values, element, operand.shape[-1]).mT.contiguous(), element)
    return _padded(values, _OUTER, _CONTRACTED // 2).view(torch.float4_e2m1fn_x2)


def _scales(operand: Quantized, kind: str) -> list[Tensor]:
    """Return the scales as ``scaled_mm`` takes them, with the contracted dimension last."""
    scale = operand.scale
    if kind == "tensor":
        return [scale.to(torch.float32).view(())]
    scale = scale if operand.dim == -1 else scale.mT
    if kind == "row":
        return [_padded(scale.to(torch.float32), _OUTER, 1)]
    granularity = operand.quantization.granularity
    bits = scale.view(torch.uint8)
    if isinstance(granularity, tuple):  # of a tile: every row has it
        bits = bits.repeat_interleave(granularity[0], 0)[: _rows(operand)]
    scales = [_swizzled(bits).view(scale.dtype)]
    if operand.tensor_scale is not None:
        scales.append(operand.tensor_scale)
    return scales


def _swizzled(scales: Tensor) -> Tensor:
    """Return scales of rows by blocks in the order of ``SWIZZLE_32_4_4``.

    Tiles of 128 by 4 are contiguous. In a tile, row ``32 i + j`` and block ``k`` are at ``16 j + 4 i + k``:
    cuBLAS documentation, "1D Block Scaling Factors Layout".
    """
    rows = _padded(scales, 128, 4)
    tiles = rows.view(rows.shape[0] // 128, 4, 32, rows.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def _padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Return `matrix`, contiguous, with zeros up to multiples of `rows` and `columns`."""
    missing = (0, -matrix.shape[1] % columns, 0, -matrix.shape[0] % rows)
    return functional.pad(matrix, missing).contiguous() if any(missing) else matrix.contiguous()
