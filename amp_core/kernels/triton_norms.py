"""Triton programs for gradient statistics: norms, and which tensors contain inf or NaN.

One launch per dtype computes a unit and a sum for each row; two more combine them per tensor and then
overall. There are no atomic operations, so the results are deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from amp_core.kernels.triton_programs import place_of

PARTS = 1024
"""Number of partial results to combine at a time."""

_INF = tl.constexpr(float("inf"))
# For peaks in this range, float32 can represent sums of squares over any number of chunks.
_LOW = tl.constexpr(2.0**-40)
_HIGH = tl.constexpr(2.0**40)


@triton.jit
def _power(x, order, ORDER: tl.constexpr):
    """Return x ** order, for x >= 0. `ORDER` is 1, 2, 0 for inf, or -1 for any other."""
    if ORDER == 2:
        result = x * x
    elif ORDER == -1:
        result = tl.exp2(tl.log2(x) * order)
    else:
        result = x
    return result


@triton.jit
def _absolute(pointer, mask, unit, RELATIVE: tl.constexpr, ACC: tl.constexpr):
    if mask is None:
        x = tl.abs(tl.load(pointer).to(ACC))
    else:
        x = tl.abs(tl.load(pointer, mask=mask, other=0.0).to(ACC))
    if RELATIVE:
        x = x / unit
    return x


@triton.jit
def _read_span(
    pointer, count, unit, order,
    ORDER: tl.constexpr, RELATIVE: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    peak = tl.zeros([BLOCK], ACC)
    total = tl.zeros([BLOCK], ACC)
    whole = count // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):  # no mask, which would prevent wide loads
        x = _absolute(pointer + first + at, None, unit, RELATIVE, ACC)
        peak = tl.maximum(peak, x)
        total += _power(x, order, ORDER)
    x = _absolute(pointer + whole + at, whole + at < count, unit, RELATIVE, ACC)
    peak = tl.maximum(peak, x)
    total += _power(x, order, ORDER)
    return tl.max(peak, 0), tl.sum(total, 0)


@triton.jit
def _read(
    address, count, unit, order,
    DTYPE: tl.constexpr, ORDER: tl.constexpr, RELATIVE: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the largest |x / unit| and the sum of |x / unit| ** order; a NaN shows only in the sum."""
    pointer = address.to(tl.pointer_type(DTYPE))
    if address % 16 == 0:
        pointer = tl.multiple_of(pointer, 16)
        peak, total = _read_span(pointer, count, unit, order, ORDER, RELATIVE, ACC, BLOCK)
    else:
        peak, total = _read_span(pointer, count, unit, order, ORDER, RELATIVE, ACC, BLOCK)
    return peak, total


@triton.jit(do_not_specialize=["first_row"])
def measure_rows(
    addresses, sizes, row_tensor, row_start, first_row, units, sums, order,
    DTYPE: tl.constexpr, ORDER: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a unit u and a sum s for each row, such that its norm is u * s ** (1 / order).

    If a row contains inf or NaN, so is its unit.
    """
    row = first_row + tl.program_id(0)
    tensor, start, count = place_of(row, sizes, row_tensor, row_start)
    address = tl.load(addresses + tensor) + start * (DTYPE.primitive_bitwidth // 8)
    one = tl.full([], 1.0, ACC)
    peak, total = _read(address, count, one, order, DTYPE, 2 if ORDER == 2 else 1, False, ACC, BLOCK)
    peak = tl.where(total >= 0, peak, total)  # a NaN shows in the total
    if ORDER == 1 or ORDER == 2:
        plain = (peak >= _LOW) & (peak <= _HIGH)
    else:
        plain = peak < 0
    unit = tl.where(plain, one, peak)
    if ORDER != 0:
        if (peak > 0) & (peak < _INF) & (plain == 0):
            # Rare for orders 1 and 2: powers of the elements would leave float32's range.
            _, total = _read(address, count, peak, order, DTYPE, ORDER, True, ACC, BLOCK)
    tl.store(units + row, unit)
    tl.store(sums + row, total)


@triton.jit
def _combine(units, sums, first, end, order, ORDER: tl.constexpr, ACC: tl.constexpr, PARTS: tl.constexpr):
    """Combine units and sums for ``first <= i < end``; also return the sum of non-finite units."""
    at = tl.arange(0, PARTS)
    top = tl.zeros([PARTS], ACC)
    spoilt = tl.zeros([PARTS], ACC)
    for i in range(first, end, PARTS):
        unit = tl.load(units + i + at, mask=i + at < end, other=0.0)
        finite = unit < _INF
        top = tl.maximum(top, tl.where(finite, unit, 0.0))
        spoilt += tl.where(finite, 0.0, unit)
    unit_of_all = tl.max(top, 0)
    divisor = tl.where(unit_of_all > 0, unit_of_all, 1.0)
    total = tl.zeros([PARTS], ACC)
    for i in range(first, end, PARTS):
        unit = tl.load(units + i + at, mask=i + at < end, other=0.0)
        part = tl.load(sums + i + at, mask=i + at < end, other=0.0)
        counts = (unit > 0) & (unit < _INF)
        total += tl.where(counts, part * _power(unit / divisor, order, ORDER), 0.0)
    return unit_of_all, tl.sum(total, 0), tl.sum(spoilt, 0)


@triton.jit
def _norm(unit, total, spoilt, order, ORDER: tl.constexpr, ACC: tl.constexpr):
    if ORDER == 2:
        if ACC == tl.float32:
            root = tl.sqrt_rn(total)
        else:
            root = tl.sqrt(total)
        norm = unit * root
    elif ORDER == 1:
        norm = unit * total
    elif ORDER == 0:
        norm = unit
    else:
        norm = unit * tl.exp2(tl.log2(total) / order)
    return tl.where(spoilt == 0, norm, spoilt)


@triton.jit(do_not_specialize=["rows"])
def measure_tensors(
    first_row, end_row, units, sums, rows, norms, nonfinite, order,
    ORDER: tl.constexpr, ACC: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Combine each tensor's rows into its norm and flag; store its unit and sum after the `rows`."""
    tensor = tl.program_id(0)
    first, end = tl.load(first_row + tensor), tl.load(end_row + tensor)
    unit, total, spoilt = _combine(units, sums, first, end, order, ORDER, ACC, PARTS)
    bad = spoilt != 0
    tl.store(units + rows + tensor, tl.where(bad, spoilt, unit))
    tl.store(sums + rows + tensor, total)
    tl.store(norms + tensor, _norm(unit, total, spoilt, order, ORDER, ACC))
    tl.store(nonfinite + tensor, tl.where(bad, 1.0, 0.0))


@triton.jit(do_not_specialize=["first", "end"])
def measure_total(
    units, sums, first, end, norm, found_inf, order,
    ORDER: tl.constexpr, ACC: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Combine the per-tensor results of `measure_tensors`."""
    unit, total, spoilt = _combine(units, sums, first, end, order, ORDER, ACC, PARTS)
    tl.store(norm, _norm(unit, total, spoilt, order, ORDER, ACC))
    tl.store(found_inf, tl.where(spoilt != 0, 1.0, 0.0))
