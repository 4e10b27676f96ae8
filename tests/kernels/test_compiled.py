"""The compiled kernels of the CPU against the portable ones, and what happens without a compiler."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import amp_core
from amp_backend_cpu import kernels as cpu
from amp_backend_cpu import library
from amp_core.kernels import PORTABLE

from ..drawn import examples

COMPILED = cpu.load()
needs_library = pytest.mark.skipif(
    not isinstance(COMPILED, cpu.Compiled), reason=f"no compiled kernels: {COMPILED.reason}"
)
pytestmark = pytest.mark.usefixtures("instruction_set")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LENGTHS = [0, 1, 15, 16, 17, 31, 33, 16385, 32767, 32768, 32769, 65535, 65537, 131073]


def numbers(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_measure(dtype: torch.dtype, n: int) -> None:
    """The norm of some length is off, or a tensor is written that is only to be read."""
    grads = [numbers(n, dtype), numbers(3, dtype)]
    versions = [g._version for g in grads]
    ours, reference = COMPILED.grad_stats(grads), PORTABLE.grad_stats(grads)
    torch.testing.assert_close(ours.norm, reference.norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.norms, reference.norms, rtol=1e-6, atol=0)
    assert ours.found_inf.item() == 0.0
    assert [g._version for g in grads] == versions


@needs_library
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(LENGTHS[1:]),
    st.sampled_from([math.inf, -math.inf, math.nan]),
    st.floats(0, 1, exclude_max=True),
)
@examples(80)
def test_one_bad_element_anywhere(dtype: torch.dtype, n: int, bad: float, where: float) -> None:
    """An inf or NaN at some position, a vector's tail above all, is not seen."""
    grad = numbers(n, dtype)
    grad[int(where * n)] = bad
    measured = COMPILED.grad_stats([numbers(5, dtype), grad])
    assert measured.nonfinite.tolist() == [0.0, 1.0]
    assert measured.found_inf.item() == 1.0
    found = torch.zeros(())
    COMPILED.multiply_([grad], torch.tensor(0.5), found)
    assert found.item() == 1.0


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1, -0x7FFFFF])
def test_any_nan_is_a_factor(dtype: torch.dtype, bits: int) -> None:
    """A NaN with other lower bits turns bfloat16 gradients into zeros, and no flag is set."""
    factor = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for n in (1, 35, 1031):
        grad, found = numbers(n, dtype), torch.zeros(())
        COMPILED.multiply_([grad], factor, found)
        assert grad.isnan().all()
        assert found.item() == 1.0


@needs_library
@pytest.mark.parametrize("n", LENGTHS)
def test_stored_weights(n: int) -> None:
    """A weight is split, joined or rounded to other bits than elsewhere, so a run cannot move there."""
    wide = numbers(n, torch.float32)
    ties = (wide[::3].view(torch.int32) & ~0xFFFF) + 0x7FC0 + torch.arange(len(wide[::3])) % 0x81
    wide[::3] = ties.to(torch.int32).view(torch.float32)  # and what is nearly one
    wide[n // 2 : n // 2 + 1] = math.inf
    lows = [torch.empty(n, dtype=torch.bfloat16) for _ in range(4)]
    for kept in (torch.int16, torch.bfloat16):
        rests, wides = [torch.empty(n, dtype=kept) for _ in range(2)], [torch.empty(n) for _ in range(2)]
        for i, kernels in enumerate((COMPILED, PORTABLE)):
            kernels.split_([wide.clone()], [lows[i]], [rests[i]])
            kernels.join_([wides[i]], [lows[i]], [rests[i]])
        assert torch.equal(lows[0], lows[1])
        assert torch.equal(rests[0], rests[1])
        assert torch.equal(wides[0], wides[1])
        again = torch.empty_like(lows[0])
        COMPILED.split_([wides[1]], [again], [rests[1]])
        assert torch.equal(again, lows[0])
        if kept is torch.int16:
            assert torch.equal(wides[0], wide)
    shard = torch.arange(7, 7 + n, dtype=torch.int32)
    for key, counted in ((3, None), (2**64 - 5, shard)):
        versions = [low._version for low in lows]
        for low, kernels in zip(lows, (COMPILED, PORTABLE), strict=False):
            kernels.round_([wide.clone()], [low], [key], [counted])
        assert torch.equal(lows[0], lows[1])
        assert lows[0]._version > versions[0]


@needs_library
def test_stored_weights_of_other_dtypes_are_not_written() -> None:
    """Float32 values are written past the end of bfloat16 weights that are passed in their place."""
    room, low, kept = (torch.zeros(64, dtype=d) for d in (torch.bfloat16, torch.bfloat16, torch.int16))
    wide, ones = torch.ones(16), torch.ones(16, dtype=torch.bfloat16)
    for call in (
        lambda: COMPILED.join_([room[:16]], [ones], [kept[:16]]),
        lambda: COMPILED.split_([ones], [low[:16]], [kept[:16]]),
        lambda: COMPILED.split_([wide], [torch.ones(16)], [kept[:16]]),
        lambda: COMPILED.round_([ones], [low[:16]], [1], [None]),
        lambda: COMPILED.round_([wide], [low[:16]], [1], [torch.zeros(15, dtype=torch.int32)]),
    ):
        with pytest.raises(RuntimeError):
            call()
    for beyond in (room[16:], low[16:], kept[16:]):
        assert not beyond.any()
    COMPILED.join_([wide], [torch.full((16,), 2.0)], [kept[16:32]])
    assert wide.tolist() == [2.0] * 16


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_scale(dtype: torch.dtype, n: int) -> None:
    """A product differs from the portable one, or the version counter does not move."""
    ours, reference = [numbers(n, dtype)], [numbers(n, dtype)]
    version = ours[0]._version
    COMPILED.multiply_(ours, torch.tensor(1 / 3000))
    PORTABLE.multiply_(reference, torch.tensor(1 / 3000))
    assert torch.equal(ours[0], reference[0])
    assert ours[0]._version > version


@needs_library
def test_a_product_that_overflows_is_found() -> None:
    """Finite values that leave their dtype when multiplied are taken for good."""
    for dtype in (torch.float32, torch.bfloat16):
        found = torch.zeros(())
        COMPILED.multiply_([torch.full((40,), 1e30, dtype=dtype)], torch.tensor(1e30), found)
        assert found.item() == 1.0


@needs_library
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_cast_of_every_value(source: torch.dtype, target: torch.dtype) -> None:
    """A value is rounded otherwise than by torch; all 16-bit patterns are tried, NaN and subnormal too."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    if source.itemsize == 2:
        values = patterns.to(torch.int16).view(source)
    else:
        wide = (patterns << 16) + (patterns * 40503 & 0xFFFF)
        values = wide.view(torch.float32).to(source)
    (ours,) = COMPILED.cast([values], target)
    theirs = values.to(target)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(nan=0.0), theirs.nan_to_num(nan=0.0))
    assert torch.equal(ours.signbit()[~ours.isnan()], theirs.signbit()[~theirs.isnan()])


@needs_library
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_cast_of_ties_and_edges(source: torch.dtype, target: torch.dtype) -> None:
    """A number half way between two of the target, or next to its limits, is rounded the wrong way."""
    halfway = torch.arange(2**12, dtype=torch.float64) * 2.0**-10
    powers = 2.0 ** torch.arange(-150, 128, dtype=torch.float64)
    limits = torch.tensor([65504, 65519.996, 65520, 65536, 2.0**-25, 3.4e38, 1e-45, 6.1e-5, 0.0])
    values = (1 + halfway[:64, None] * 2.0**2) * powers
    values = torch.cat(
        [values.flatten(), halfway * 2.0**-24, limits.double(), torch.tensor([math.inf, math.nan])]
    )
    values = torch.cat([values, -values]).to(source)
    (ours,) = COMPILED.cast([values], target)
    assert torch.equal(ours.nan_to_num(nan=1.0), values.to(target).nan_to_num(nan=1.0))
    assert torch.equal(ours.isnan(), values.isnan())


@pytest.fixture(params=[0, 1], ids=["cached", "streamed"])
def streaming(request: pytest.FixtureRequest) -> Iterator[None]:
    """Decide how large casts store their results, whatever is faster on this CPU."""
    COMPILED._tuning.settle()
    before = COMPILED._library.amp_stream(-1)
    COMPILED._library.amp_stream(request.param)
    yield
    COMPILED._library.amp_stream(before)


@needs_library
@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("shift", [0, 1, 16])
def test_large_casts(target: torch.dtype, shift: int) -> None:
    """Results that are streamed past the caches, into memory of some alignment, are not all there."""
    source = torch.float32 if target is not torch.float32 else torch.bfloat16
    values = numbers(4_300_003, source)
    room = torch.full((4_300_003 + shift + 1,), 7.0, dtype=target)
    COMPILED.cast([values, values[:5]], target, [room[shift:-1], torch.empty(5, dtype=target)])
    assert torch.equal(room[shift:-1], values.to(target))
    assert room[:shift].tolist() == [7.0] * shift
    assert room[-1].item() == 7.0


@needs_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", LENGTHS)
def test_add(dtype: torch.dtype, n: int) -> None:
    """A sum is rounded twice or not at all, or the version of what is written stays."""
    every = torch.arange(2**16).to(torch.uint16).view(dtype)
    grads = [numbers(n, dtype), every, numbers(20, dtype).view(4, 5).t()]
    ours, reference = ([numbers(g.numel(), torch.float32).view_as(g) for g in grads] for _ in range(2))
    ours[2], reference[2] = (torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).t() for _ in "ab")
    COMPILED.add_(ours, grads)
    PORTABLE.add_(reference, grads)
    for mine, right in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0, equal_nan=True)
    assert [t._version for t in ours] == [1, 1, 1]


@needs_library
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", [torch.float32, torch.float64])
def test_add_of_other_dtypes_and_layouts(source: torch.dtype, target: torch.dtype) -> None:
    """What the library does not add is added wrong, or as if it were of the other's layout."""
    total, grad = numbers(12, target).view(3, 4), numbers(12, source).view(4, 3).t()
    expected = total + grad
    COMPILED.add_([total], [grad])
    assert torch.equal(total, expected.to(target))


@needs_library
def test_number_of_threads_changes_nothing() -> None:
    """The norm depends on how many threads there are."""
    grads = [numbers(300_000, torch.float32)]
    before = torch.get_num_threads()
    norms = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            norms.append(COMPILED.grad_stats(grads).norm.item())
    finally:
        torch.set_num_threads(before)
    assert len(set(norms)) == 1


@needs_library
@examples(30)
@given(
    st.lists(st.sampled_from([0, 1, 900, 65_537, 70_000, 200_000]), max_size=8),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 9),
)
def test_threads_divide_the_work(sizes: list[int], dtype: torch.dtype, threads: int) -> None:
    """An element belongs to the shares of two threads, or of none; or a norm depends on who has it."""
    grads = [numbers(n, dtype) for n in [*sizes, 1_100_000]]
    expected, alone = [grad * 2 for grad in grads], COMPILED.grad_stats(grads).norm
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(COMPILED.grad_stats(grads).norm, alone)
        COMPILED.multiply_(grads, torch.tensor(2.0))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(grads, expected, strict=True))


@needs_library
def test_what_the_library_does_not_take() -> None:
    """A strided, complex or empty list is read as if it were plain memory."""
    strided = torch.arange(20.0).reshape(4, 5).t()
    complexes = torch.ones(3, dtype=torch.complex64)
    for grads in ([strided], [complexes], [strided, torch.ones(2)], []):
        ours, reference = COMPILED.grad_stats(grads), PORTABLE.grad_stats(grads)
        torch.testing.assert_close(ours.norm, reference.norm)


@needs_library
def test_permuted_memory_without_gaps() -> None:
    """Gradients in channels_last take the slow way, or a cast between two layouts mixes up its elements."""
    image = numbers(2 * 3 * 4 * 5, torch.float32).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert cpu._table_of([image, numbers(6, torch.float32).reshape(2, 3).t()]) is not None
    assert cpu._table_of([image[:, :, ::2]]) is None
    assert cpu._table_of([torch.ones(1).expand(4)]) is None
    expected = PORTABLE.grad_stats([image]).norm
    torch.testing.assert_close(COMPILED.grad_stats([image]).norm, expected)
    (cast,) = COMPILED.cast([image], torch.bfloat16)
    assert cast.stride() == image.stride()
    assert torch.equal(cast, image.bfloat16())
    (other,) = COMPILED.cast([image], torch.bfloat16, [torch.empty(2, 3, 4, 5, dtype=torch.bfloat16)])
    assert torch.equal(other, image.bfloat16())


@needs_library
def test_prepared_tensors() -> None:
    """A list that was prepared gives other results than the list."""
    mixed = [numbers(40, torch.float32), numbers(7, torch.float16)]
    for grads in (mixed, [torch.ones(2, dtype=torch.cfloat)], []):
        ready = COMPILED.prepare(grads)
        measured = COMPILED.grad_stats(ready)
        assert measured.norms.tolist() == COMPILED.grad_stats(grads).norms.tolist()
        expected = [g * 0.5 for g in grads]
        COMPILED.multiply_(ready, torch.tensor(0.5))
        assert all(torch.equal(g, e) for g, e in zip(grads, expected, strict=True))
        assert all(a is b for a, b in zip(ready, grads, strict=True))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was compiled the device has no kernels, or does not say why it is slow."""
    monkeypatch.setattr(library, "path", lambda: Path("nowhere"))
    kernels = cpu.load.__wrapped__()
    assert kernels.name == "portable"
    assert "no C compiler at install time" in kernels.reason
    assert amp_core.get_backend("cpu").kernels() is COMPILED


@needs_library
def test_a_library_from_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an update of the sources alone, an old library is called with the wrong arguments."""
    monkeypatch.setattr(library, "_ABI", -1)
    kernels = cpu.load.__wrapped__()
    assert kernels.name == "portable"
    assert "install amp-core again" in kernels.reason


@needs_library
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_float64_is_rounded_once(target: torch.dtype) -> None:
    """A float64 is rounded to float32 first, and what lies next to a tie falls on its wrong side."""
    if target is torch.bfloat16:
        just_above = torch.tensor([1 + 2.0**-8 + 2.0**-40])
        assert COMPILED.cast([just_above.double()], target)[0].item() == 1.0
        just_above = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
        assert COMPILED.cast([just_above], target)[0].item() == 1.0078125
        assert PORTABLE.cast([just_above], target)[0].item() == 1.0078125
    every = torch.arange(2**16).to(torch.uint16).view(target)
    every = every[every.isfinite() & (every.abs() < every[every.isfinite()].max())].double()
    # The tie above each number, exactly half way to the next, and its two neighbours in float64.
    above = every.abs().unique()
    ties = (above[:-1] + above[1:]) / 2
    below, beyond = (torch.nextafter(ties, torch.full_like(ties, to)) for to in (-math.inf, math.inf))
    assert torch.equal(COMPILED.cast([below], target)[0].double(), above[:-1])
    assert torch.equal(COMPILED.cast([beyond], target)[0].double(), above[1:])
    assert torch.equal(COMPILED.cast([-beyond], target)[0].double(), -above[1:])
    assert torch.equal(COMPILED.cast([ties], target)[0], ties.float().to(target))


@needs_library
@pytest.mark.parametrize("exponent", [-149, -130, -80, -64, -63, -40, 0, 40, 62, 63, 64, 100, 127])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_every_magnitude(dtype: torch.dtype, exponent: int) -> None:
    """Squares that leave float32, upwards or downwards, are lost in the norm or raise the flag."""
    for n in (1, 40, 5000):
        grad = (1 + torch.rand(n, generator=torch.Generator().manual_seed(n)).double()) * 2.0**exponent
        grad = grad.clamp(max=3.3e38).to(dtype)
        measured = COMPILED.grad_stats([grad, torch.zeros(3000, dtype=dtype)])
        exact = grad.double().norm()
        if exact < 3.4e38:
            torch.testing.assert_close(measured.norms[0].double(), exact, rtol=1e-6, atol=2.0**-149)
        assert measured.norms[1].item() == 0.0
        assert measured.nonfinite.tolist() == [0.0, 0.0]


@needs_library
@given(st.floats(1e-3, 1e3), st.integers(1, 70_000))
@examples(30)
def test_norm_of_equal_numbers(value: float, n: int) -> None:
    """Rounding errors that all go one way add up to more than a millionth of the norm."""
    grad = torch.full((n,), value)
    exact = grad.double().norm()
    torch.testing.assert_close(COMPILED.grad_stats([grad]).norm.double(), exact, rtol=1e-6, atol=0)


@needs_library
@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_under_another_default_device_and_dtype(device: str, default: torch.dtype) -> None:
    """A result is made on the default device, whose memory is not there, or in the default dtype."""
    before = torch.get_default_dtype()
    for grads in ([numbers(40, torch.float32)], []):
        for kernels in (COMPILED, PORTABLE):
            factor, found = torch.tensor(0.5), torch.zeros(())
            try:
                torch.set_default_dtype(default)
                with torch.device(device):
                    measured = kernels.grad_stats(grads)
                    kernels.multiply_(grads, factor, found)
                    cast = kernels.cast(grads, torch.bfloat16)
            finally:
                torch.set_default_dtype(before)
            results = [measured.norm, measured.norms, measured.nonfinite, measured.found_inf]
            assert [t.dtype for t in results] == [torch.float32] * 4
            if grads:
                assert {t.device.type for t in [*results, *cast]} == {"cpu"}


@needs_library
def test_lazily_negated_and_conjugated_tensors() -> None:
    """A tensor whose sign is not in its memory yet is taken with the sign of its memory."""
    values = torch.arange(1.0, 7.0)
    negated = torch._neg_view(values.clone())
    conjugated = torch.complex(values, values).clone().conj()
    assert torch.equal(COMPILED.cast([negated], torch.bfloat16)[0], -values.bfloat16())
    for tensor in (negated, conjugated):
        expected = tensor.clone() * 0.5
        torch.testing.assert_close(COMPILED.grad_stats([tensor]).norm, tensor.clone().abs().norm())
        COMPILED.multiply_([tensor], torch.tensor(0.5))
        assert torch.equal(tensor.clone(), expected)
    target = torch._neg_view(torch.zeros(6, dtype=torch.bfloat16))
    COMPILED.cast([values], torch.bfloat16, [target])
    assert target.tolist() == values.tolist()


@needs_library
@pytest.mark.parametrize("factor", [1.0, 0.37, -0.5, 0.0, 3.0, math.nan, math.inf])
@pytest.mark.parametrize("bad", [[], [math.inf], [math.nan]])
def test_a_few_small_gradients_have_the_bits_of_many(factor: float, bad: list[float]) -> None:
    """Torch's kernel, which takes a few small gradients, rounds otherwise or misses an inf."""
    grads = [torch.tensor([1.5, -2.0, 1e-40, 0.0, 3e38, *bad]), torch.randn(7, 3).t(), torch.zeros(0)]
    sides = []
    for form in (list, COMPILED.prepare):
        given = form([grad.clone() for grad in grads])
        flag = torch.tensor(0.5)
        COMPILED.multiply_(given, torch.tensor(factor), flag)
        sides.append((given, flag))
    assert sides[1][0].layout.few
    assert all(grad._version == 1 for grad in (*sides[1][0], sides[1][1]))
    for one, other in zip(sides[0][0], sides[1][0], strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        bits = [t.nan_to_num(0.0, math.inf, -math.inf).view(torch.int32) for t in (one, other)]
        assert torch.equal(*bits)
    assert sides[0][1] == sides[1][1]


@needs_library
def test_gradients_that_torch_may_refuse_to_write_to() -> None:
    """Gradients of a backward with create_graph, or made in inference mode, get torch's error."""
    with torch.inference_mode():
        inferred = torch.ones(3)
    for grad in (torch.ones(3, requires_grad=True), inferred):
        flag = torch.zeros(())
        COMPILED.multiply_(COMPILED.prepare([grad]), torch.tensor(0.5), flag)
        assert grad.tolist() == [0.5] * 3


@needs_library
def test_memory_that_was_freed() -> None:
    """A tensor whose storage was given back, as by FSDP between uses, is read at address zero."""
    grad = torch.ones(40)
    grad.untyped_storage().resize_(0)
    assert cpu._table_of([grad]) is None
