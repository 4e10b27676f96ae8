"""Triton programs that process many tensors in one launch through a table of addresses.

`amp_core.kernels.gpu` imports this module if Triton is available. Each tensor is divided into chunks of
`CHUNK` elements, and each program handles one *row*: a tensor's index in the table and a chunk's first
element. Counts, indices and addresses are int64, so the size of tensors and lists is not limited.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 16384
"""Elements per program: enough to hide the table lookups, few enough to balance the load on a GPU."""

BLOCK = 4096
"""Elements in flight at a time: four 16-byte loads of float32 for each thread of 8 warps."""

OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}  # Triton 3.9 warns if fusion is not set

WORDS = 8
"""Numbers per `write_words` launch."""

_CHUNK = tl.constexpr(CHUNK)
_INF = tl.constexpr(float("inf"))


@triton.jit
def place_of(row, sizes, row_tensor, row_start):
    """Return a row's tensor, its first element in that tensor, and its number of elements."""
    tensor = tl.load(row_tensor + row)
    start = tl.load(row_start + row)
    return tensor, start, tl.minimum(tl.load(sizes + tensor) - start, _CHUNK).to(tl.int32)


@triton.jit
def _scale_span(pointer, count, factor, DTYPE: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    bad = tl.zeros([BLOCK], tl.int32)
    whole = count // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        x = (tl.load(pointer + first + at).to(ACC) * factor).to(DTYPE)
        tl.store(pointer + first + at, x)
        bad = tl.where(tl.abs(x.to(ACC)) < _INF, bad, 1)
    inside = whole + at < count
    x = (tl.load(pointer + whole + at, mask=inside, other=0.0).to(ACC) * factor).to(DTYPE)
    tl.store(pointer + whole + at, x, mask=inside)
    bad = tl.where((tl.abs(x.to(ACC)) < _INF) | (whole + at >= count), bad, 1)
    return tl.max(bad, 0)


@triton.jit(do_not_specialize=["first_row"])
def scale_rows(
    addresses, sizes, row_tensor, row_start, first_row, factor, found_inf,
    DTYPE: tl.constexpr, ACC: tl.constexpr, FLAG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply in place; no product with inf or NaN is finite, so one check covers before and after."""
    row = first_row + tl.program_id(0)
    tensor, start, count = place_of(row, sizes, row_tensor, row_start)
    address = tl.load(addresses + tensor) + start * (DTYPE.primitive_bitwidth // 8)
    pointer = address.to(tl.pointer_type(DTYPE))
    by = tl.load(factor).to(ACC)
    if address % 16 == 0:
        bad = _scale_span(tl.multiple_of(pointer, 16), count, by, DTYPE, ACC, BLOCK)
    else:
        bad = _scale_span(pointer, count, by, DTYPE, ACC, BLOCK)
    if FLAG:
        if bad != 0:  # all writers store the same value
            tl.store(found_inf, 1.0)


@triton.jit
def _moved(source, target, mask, TARGET: tl.constexpr, ACC: tl.constexpr, ADD: tl.constexpr):
    x = tl.load(source, mask=mask).to(ACC)  # torch, too, rounds float64 to float32 on its way to 16 bits
    if ADD:
        x += tl.load(target, mask=mask).to(ACC)
    tl.store(target, x.to(TARGET), mask=mask)


@triton.jit
def _move_span(
    source, target, count, TARGET: tl.constexpr, ACC: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.arange(0, BLOCK)
    whole = count // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):  # no mask, which would prevent wide loads
        _moved(source + first + at, target + first + at, None, TARGET, ACC, ADD)
    _moved(source + whole + at, target + whole + at, whole + at < count, TARGET, ACC, ADD)


@triton.jit(do_not_specialize=["first_row"])
def move_rows(
    addresses, targets, sizes, row_tensor, row_start, first_row,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, ACC: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each element to the target, rounded to nearest even; or add it there, and round each sum once."""
    row = first_row + tl.program_id(0)
    tensor, start, count = place_of(row, sizes, row_tensor, row_start)
    here = tl.load(addresses + tensor) + start * (SOURCE.primitive_bitwidth // 8)
    there = tl.load(targets + tensor) + start * (TARGET.primitive_bitwidth // 8)
    source = here.to(tl.pointer_type(SOURCE))
    target = there.to(tl.pointer_type(TARGET))
    if (here | there) % 16 == 0:
        _move_span(tl.multiple_of(source, 16), tl.multiple_of(target, 16), count, TARGET, ACC, ADD, BLOCK)
    else:
        _move_span(source, target, count, TARGET, ACC, ADD, BLOCK)


@triton.jit
def _float64(bits):
    """Return a float64 from its bits, because Triton would round a float argument to float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit(
    do_not_specialize=["growth_bits", "backoff_bits", "min_bits", "max_bits", "interval", "hysteresis"]
)
def update_scale(
    scale, growth_tracker, hysteresis_left, found_inf,
    growth_bits: tl.int64, backoff_bits: tl.int64, min_bits: tl.int64, max_bits: tl.int64,
    interval: tl.int64, hysteresis: tl.int64,
    BUDGET: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Apply `amp_core.states.loss_scale.next_scale` in one thread."""
    old = tl.load(scale)
    wide = old.to(tl.float64)
    tracker = tl.load(growth_tracker).to(tl.int64) + 1
    left = tl.load(hysteresis_left)
    full = (left * 0 + hysteresis).to(tl.int32)
    overflow = tl.load(found_inf) > 0
    spent = left - 1
    forgiven = spent > 0

    lowered = (wide * _float64(backoff_bits)).to(tl.float32).to(tl.float64)
    floored = tl.minimum(wide, tl.maximum(lowered, _float64(min_bits))).to(tl.float32)
    grown = (wide * _float64(growth_bits)).to(tl.float32).to(tl.float64)
    capped = tl.maximum(wide, tl.minimum(grown, _float64(max_bits))).to(tl.float32)
    capped = tl.where(grown < _INF, capped, old)

    due = tracker >= interval
    after_overflow = tl.where(forgiven, spent, full if EVERY else tl.maximum(spent, 0))
    after_step = tl.where(due, full, left if BUDGET else full)
    new = tl.where(overflow, tl.where(forgiven, old, floored), tl.where(due, capped, old))
    tl.store(scale, new)
    tl.store(growth_tracker, tl.where(overflow | due, 0, tracker).to(tl.int32))
    tl.store(hysteresis_left, tl.where(overflow, after_overflow, after_step))


@triton.jit(do_not_specialize=["first", "count", "a", "b", "c", "d", "e", "f", "g", "h"])
def write_words(
    words, first, count,
    a: tl.int64, b: tl.int64, c: tl.int64, d: tl.int64, e: tl.int64, f: tl.int64, g: tl.int64, h: tl.int64,
):  # fmt: skip
    """Write up to `WORDS` numbers, passed as launch arguments, starting at ``words[first]``."""
    place = words + first
    tl.store(place, a)
    tl.store(place + 1, b, mask=count > 1)
    tl.store(place + 2, c, mask=count > 2)
    tl.store(place + 3, d, mask=count > 3)
    tl.store(place + 4, e, mask=count > 4)
    tl.store(place + 5, f, mask=count > 5)
    tl.store(place + 6, g, mask=count > 6)
    tl.store(place + 7, h, mask=count > 7)
