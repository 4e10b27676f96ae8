"""The portable kernels against NumPy, against `amp_core.states.loss_scale`, and on what only they take."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import amp_core
from amp_core.kernels import PORTABLE, Kernels, ScaleTensors, portable, portable_kernels
from amp_core.states.loss_scale import Hysteresis, LossScaleSchedule, ScaleState, next_scale

from ..drawn import examples

CPU = amp_core.get_backend("cpu").kernels()
ON_THIS_CPU: list[Kernels] = list({id(k): k for k in (PORTABLE, CPU)}.values())
REAL = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*REAL, torch.complex64, torch.complex128]
ORDERS = [1.0, 2.0, math.inf, 3.0, 0.5, 9.0]
TINY = {torch.float32: 1e-44, torch.float64: 1e-320, torch.bfloat16: 1e-39, torch.float16: 1e-7}

each_kernel = pytest.mark.parametrize("kernels", ON_THIS_CPU, ids=lambda k: k.name)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + 7), dtype=dtype)


def reference(tensor: torch.Tensor, order: float) -> float:
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return float(np.linalg.norm(wide.flatten().numpy(), order)) if tensor.numel() else 0.0


class Ops(TorchDispatchMode):
    """Name the ops that run, and copy what the ops of these names return."""

    def __init__(self, copied: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._copied = copied

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name().partition(".")[0])
        result = func(*args, **(kwargs or {}))
        return result.clone() if self.seen[-1] in self._copied else result


@each_kernel
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(kernels: Kernels, dtype: torch.dtype, order: float) -> None:
    """A norm differs from NumPy's, or a gradient is written that is only to be read."""
    grads = [
        numbers(37, 5).to(dtype),
        numbers(5, 4, 3).to(dtype).permute(2, 0, 1),
        torch.tensor(-2.0).to(dtype),
    ]
    grads += [torch.empty(0, 3, dtype=dtype), torch.zeros(6, dtype=dtype)[::2]]
    before, versions = [g.clone() for g in grads], [g._version for g in grads]
    measured = kernels.grad_stats(grads, order)
    assert measured.norms.tolist() == pytest.approx([reference(g, order) for g in grads], rel=1e-6)
    whole = torch.cat([g.flatten() for g in grads])
    assert measured.norm.item() == pytest.approx(reference(whole, order), rel=1e-6)
    assert measured.norm.dtype is (torch.float64 if dtype.to_real() is torch.float64 else torch.float32)
    assert measured.nonfinite.tolist() == [0.0] * len(grads)
    assert measured.found_inf.item() == 0.0
    assert all(torch.equal(g, b) for g, b in zip(grads, before, strict=True))
    assert [g._version for g in grads] == versions


@each_kernel
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element(kernels: Kernels, dtype: torch.dtype, bad: float, order: float) -> None:
    """An inf or NaN, first, last or in the imaginary part, in a strided tensor too, is not seen."""
    for position in (0, 16, 36):
        grad = numbers(37).to(dtype)
        grad[position] = complex(0.0, bad) if dtype.is_complex else bad
        for spoiled in (grad, grad.repeat(2, 1).t()):
            measured = kernels.grad_stats([numbers(3).to(dtype), spoiled, torch.empty(0, dtype=dtype)], order)
            assert measured.nonfinite.tolist() == [0.0, 1.0, 0.0]
            assert measured.found_inf.item() == 1.0
            found = torch.zeros(())
            kernels.multiply_([spoiled.clone(), numbers(3).to(dtype)], torch.tensor(0.0), found)
            assert found.item() == 1.0


@each_kernel
@pytest.mark.parametrize("order", ORDERS)
def test_large_and_small_elements(kernels: Kernels, order: float) -> None:
    """Finite numbers whose powers overflow raise the flag, or give a norm of inf."""
    big, imaginary = torch.tensor([3e38, -3e37]), torch.tensor([complex(0.0, 2e38)])
    measured = kernels.grad_stats([big, imaginary], order)
    assert measured.nonfinite.tolist() == [0.0, 0.0]
    if order in {2.0, 3.0, math.inf}:
        assert measured.norms.tolist() == pytest.approx([reference(big, order), 2e38], rel=1e-6)
    huge = torch.tensor([1e200, 1.0], dtype=torch.float64)
    assert kernels.grad_stats([huge], order).found_inf.item() == 0.0
    for dtype, tiny in TINY.items():
        grad = torch.full((20,), tiny, dtype=dtype)
        assert (grad > 0).all()
        assert kernels.grad_stats([grad], math.inf).norm.item() == pytest.approx(
            grad[0].float().item(), rel=0.1
        )


@each_kernel
@pytest.mark.parametrize("order", ORDERS)
def test_a_modulus_that_overflows_sets_no_flag(kernels: Kernels, order: float) -> None:
    """A step is skipped, and the scale lowered, for gradients that are all finite."""
    for dtype in (torch.complex64, torch.complex128):
        top = torch.finfo(dtype).max
        measured = kernels.grad_stats([torch.full((3,), complex(top, -top), dtype=dtype)], order)
        assert measured.nonfinite.tolist() == [0.0]
        assert measured.found_inf.item() == 0.0


@each_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(kernels: Kernels, dtype: torch.dtype) -> None:
    """A product is rounded twice or with a rounded factor, a stride is overlooked, or no version moves."""
    grads = [numbers(5, 4).to(dtype), numbers(4, 5).to(dtype).t(), torch.tensor(-0.0).to(dtype)]
    grads.append(torch.empty(0, dtype=dtype))
    factor = torch.tensor([1 / 3000])
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32}.get(dtype, dtype)
    expected = [(g.to(wide) * factor.item()).to(dtype) for g in grads]
    if dtype.to_real() is torch.float32 or wide is torch.float32:
        by = np.float32(factor.item())
        expected = [(g.to(wide) * torch.tensor(by)).to(dtype) for g in grads]
    versions = [g._version for g in grads]
    found = torch.zeros(1)
    assert kernels.multiply_(grads, factor, found) is None
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0 if ours.dtype in TINY else 1e-7, atol=0)
    assert math.copysign(1.0, grads[2].real.item()) == -1.0
    assert found.item() == 0.0
    assert all(g._version > v for g, v in zip(grads[:3], versions, strict=False))


@each_kernel
def test_scale_keeps_a_flag_that_is_up(kernels: Kernels) -> None:
    """Finite gradients lower a flag that another list raised; a list of nothing does."""
    found = torch.ones(())
    kernels.multiply_([torch.ones(3)], torch.tensor(0.5), found)
    kernels.multiply_([], torch.tensor(0.5), found)
    assert found.item() == 1.0


@each_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_overflow_of_a_product(kernels: Kernels, dtype: torch.dtype) -> None:
    """A product beyond its dtype (float16 above all) is stepped with."""
    found = torch.zeros(())
    grad = torch.full((3,), 6e4).to(dtype)
    kernels.multiply_([grad], torch.tensor(3e38), found)
    assert found.item() == 1.0


@each_kernel
def test_lazy_conjugates(kernels: Kernels) -> None:
    """A lazily conjugated gradient is refused, or another number is multiplied."""
    grad = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert kernels.grad_stats([grad]).norm.item() == pytest.approx(math.sqrt(30))
    kernels.multiply_([grad], torch.tensor(2.0))
    assert torch.equal(grad.resolve_conj(), torch.tensor([2 - 4j, 6 + 8j]))


def test_buckets_of_narrow_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient at the edge of a bucket is left out or multiplied twice."""
    monkeypatch.setattr(portable, "_BUCKET", 10)
    grads = [torch.full((n,), 2.0, dtype=torch.bfloat16) for n in (4, 4, 4, 11, 0, 10, 1)]
    PORTABLE.multiply_(grads, torch.tensor(0.5))
    assert all(torch.equal(g, torch.ones_like(g)) for g in grads)


@pytest.mark.parametrize("order", ORDERS)
def test_a_device_without_float64(order: float) -> None:
    """Where float64 is missing (mps), squares overflow into the norm, or a bad element is lost."""
    narrow = portable_kernels(has_float64=False)
    grads = [torch.tensor([3e38, -3e37]), numbers(9).bfloat16(), torch.zeros(4), torch.empty(0)]
    measured = narrow.grad_stats(grads, order)
    if order in {2.0, 3.0, math.inf}:
        assert measured.norms.tolist() == pytest.approx([reference(g, order) for g in grads], rel=1e-5)
    assert measured.found_inf.item() == 0.0
    grads[1][4] = math.nan
    assert narrow.grad_stats(grads, order).nonfinite.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_a_device_without_float64_in_few_ops() -> None:
    """Each op is a launch, or a call of a remote machine: ten for each tensor take seconds a step."""
    grads = [numbers(9) for _ in range(50)]
    with Ops() as ops:
        portable_kernels(has_float64=False).grad_stats(grads)
    launched = Counter(name for name in ops.seen if name != "aten::detach")
    assert launched.total() < len(grads), launched


@pytest.mark.parametrize("lazy", ["", "conjugated", "negated"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_gradients_of_a_device_that_copies_views(dtype: torch.dtype, lazy: str) -> None:
    """Where `view_as_real` gives a copy (torch_openreg), gradients stay unscaled, with a clean flag."""
    grads = [numbers(5).to(dtype), numbers(4, 6).to(dtype).t()[::2], torch.tensor(1 - 2j).to(dtype)]
    if lazy:
        grads = [g.conj() if lazy == "conjugated" else torch._neg_view(g) for g in grads]
    expected, flag = [g.clone() * 0.5 for g in grads], torch.zeros(())
    with Ops(copied=("aten::view_as_real", "aten::view_as_complex")):
        PORTABLE.multiply_(grads, torch.tensor(0.5), flag)
        norms = PORTABLE.grad_stats(grads).norms
    for grad, product in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, product, rtol=0, atol=0)
    assert norms.tolist() == pytest.approx([reference(g.resolve_neg(), 2.0) for g in expected], rel=1e-6)
    assert flag.item() == 0.0


@each_kernel
def test_cast_refuses_other_shapes(kernels: Kernels) -> None:
    """A weight is broadcast into a target of another shape in silence."""
    target = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"out\[0\] has shape \(3,\), but the tensor .* has \(1,\)"):
        kernels.cast([torch.ones(1)], torch.bfloat16, [target])
    assert target.sum().item() == 0.0


@each_kernel
def test_add_refuses_other_shapes(kernels: Kernels) -> None:
    """A gradient is broadcast into a total of another shape, or some totals are written before the error."""
    totals = [torch.zeros(3), torch.zeros(3)]
    with pytest.raises(ValueError, match=r"totals\[1\] has shape \(3,\), but the tensor .* has \(1,\)"):
        kernels.add_(totals, [torch.ones(3), torch.ones(1)])
    assert totals[0].sum().item() == totals[1].sum().item() == 0.0


@each_kernel
def test_grad_stats_of_float64_in_a_region(kernels: Kernels) -> None:
    """Autocast refuses to stack float64 norms, so that clipping in a region raises."""
    with torch.autocast("cpu", dtype=torch.float16):
        stats = kernels.grad_stats([torch.full((4,), 2.0, dtype=torch.float64), torch.ones(1)], 3.0)
        assert torch.is_autocast_enabled("cpu")
    assert stats.norms.dtype is torch.float64


@each_kernel
def test_cast_keeps_layout_and_marks_what_it_wrote(kernels: Kernels) -> None:
    """A cast loses its strides, an empty list fails, or a target's version stands still."""
    source = numbers(4, 6).t()
    (cast,) = kernels.cast([source], torch.float16)
    assert cast.stride() == source.stride()
    version = cast._version
    assert kernels.cast([source], torch.float16, [cast]) == [cast]
    assert cast._version > version
    assert torch.equal(cast, source.half())
    assert kernels.cast([], torch.float16) == []


@each_kernel
def test_under_function_transforms(kernels: Kernels) -> None:
    """custom_fwd casts with these kernels, also under ``torch.func``, whose tensors have no memory."""

    def cast(x: torch.Tensor) -> torch.Tensor:
        first, second = kernels.cast([x, x * 3], torch.bfloat16)
        return first + second

    assert torch.equal(torch.func.vmap(cast)(torch.ones(2, 3)), torch.full((2, 3), 4.0).bfloat16())


@each_kernel
@given(
    scale=st.floats(2.0**-126, 2.0**127, width=32),
    tracker=st.integers(0, 4),
    left=st.integers(0, 4),
    overflow=st.booleans(),
    growth=st.floats(1.0, 1e6, exclude_min=True),
    backoff=st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
    interval=st.integers(1, 4),
    limits=st.tuples(st.floats(2.0**-126, 2.0**100), st.floats(2.0**-126, 1e300)),
    hysteresis=st.integers(1, 4),
    kind=st.sampled_from(Hysteresis),
)
@examples(300)
def test_scale_moves_as_the_state_machine_says(
    kernels: Kernels, scale: float, tracker: int, left: int, overflow: bool, growth: float, backoff: float,
    interval: int, limits: tuple[float, float], hysteresis: int, kind: Hysteresis,
) -> None:  # fmt: skip
    """The scale on the device and `amp_core.states.loss_scale.next_scale` part by a bit."""
    schedule = LossScaleSchedule(growth, backoff, interval, min(limits), max(limits), hysteresis, kind)
    state = ScaleTensors(torch.tensor(scale), torch.tensor(tracker).int(), torch.tensor(left).int())
    versions = [t._version for t in (state.scale, state.growth_tracker, state.hysteresis_left)]
    kernels.update_scale_(state, torch.tensor(float(overflow)), schedule)
    expected = next_scale(ScaleState(scale, tracker, left), overflow, schedule)
    assert state.scale.item() == expected.scale
    assert (state.growth_tracker.item(), state.hysteresis_left.item()) == (
        expected.growth_tracker,
        expected.hysteresis_left,
    )
    assert state.scale._version > versions[0]


@each_kernel
def test_nothing_waits_for_the_device(kernels: Kernels) -> None:
    """A kernel reads a result on the host: on a GPU every step would wait."""
    grads, flag = [numbers(5), numbers(4).bfloat16()], torch.zeros(())
    state = ScaleTensors(torch.tensor(8.0), torch.tensor(0).int(), torch.tensor(1).int())
    with Ops() as ops:
        kernels.grad_stats(grads)
        kernels.grad_stats(grads, 3.0)
        kernels.multiply_(grads, torch.tensor(0.5), flag)
        kernels.update_scale_(state, flag, LossScaleSchedule())
    assert "aten::_local_scalar_dense" not in ops.seen


@pytest.mark.parametrize("kept", [torch.int16, torch.bfloat16])
def test_writes_of_stored_weights_are_counted_in_inference_mode(kept):
    """Autograd would not see that a step in inference mode has overwritten what a backward pass needs."""
    wide, low, rest = torch.ones(5), torch.zeros(5, dtype=torch.bfloat16), torch.zeros(5, dtype=kept)
    with torch.inference_mode():
        for call in (
            lambda: PORTABLE.split_([wide.clone()], [low], [rest]),
            lambda: PORTABLE.round_([wide.clone()], [low], [7], [None]),
        ):
            before = low._version
            call()
            assert low._version > before
