"""What only a real CUDA GPU shows: launches, waits, graphs, several devices; elsewhere all is skipped."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import amp_core
from amp_core.kernels import PORTABLE, Kernels, ScaleTensors, gpu
from amp_core.scaling import overlap as overlapping
from amp_core.states.loss_scale import LossScaleSchedule
from amp_core.testing import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; there is none here"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
DEVICE = "cuda"
REAL = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
BLOCK = [(768,), (2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,)]


@pytest.fixture
def kernels() -> Kernels:
    found = amp_core.get_backend(DEVICE).kernels()
    if found.name != "triton":
        pytest.skip(f"needs Triton's kernels; here are {found.reason}")
    return found


def gradients(dtype: torch.dtype = torch.float32, shapes: list[tuple[int, ...]] = BLOCK) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes]


@contextmanager
def no_waits() -> Iterator[None]:
    """Have torch raise where the host waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def launches(call: Callable[[], object]) -> Counter[str]:
    """Count the kernels and copies that `call` starts, once it has been called before."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        call()
        torch.cuda.synchronize()
    ran = [e for e in profile.events() if e.device_type is torch.autograd.DeviceType.CUDA]
    return Counter(e.name.split("(")[0] for e in ran)


def scalars() -> tuple[Tensor, Tensor]:
    return torch.tensor(0.5).to(DEVICE), torch.zeros((), device=DEVICE)


def state() -> ScaleTensors:
    counts = [torch.tensor(n, dtype=torch.int32).to(DEVICE) for n in (0, 1)]
    return ScaleTensors(torch.tensor(65536.0).to(DEVICE), *counts)


# -- kernels -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_kit() -> None:
    """Any fault that the conformance kit knows, in compiled kernels instead of interpreted ones."""
    report = check(DEVICE)
    assert report.ok, [(r.check, r.message) for r in report.results if r.outcome == "failed"]


@pytest.mark.slow
def test_the_kit_without_triton() -> None:
    """Torch's multi-tensor operations on the GPU are wrong where Triton is missing."""
    from amp_core.testing import BackendFixtures

    class Foreach(BackendFixtures):
        kernels = gpu.foreach_kernels("the test wants them")

    report = check(DEVICE, areas=["cast", "grad_stats", "multiply", "update"], fixtures=Foreach)
    assert report.ok, [(r.check, r.message) for r in report.results if r.outcome == "failed"]


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf, 3.0])
@pytest.mark.parametrize("dtype", [*REAL, torch.complex64])
def test_kernels_against_the_portable_ones(kernels: Kernels, dtype: torch.dtype, order: float) -> None:
    """Compiled, a program does other sums, products or flags than the reference; so do views off 16 bytes."""
    for offset in (0, 1, 3):
        grads = [g.flatten()[offset:] for g in gradients(dtype)]
        ours, theirs = kernels.grad_stats(grads, order), PORTABLE.grad_stats(grads, order)
        torch.testing.assert_close(ours.norms, theirs.norms, rtol=2e-6, atol=0)
        torch.testing.assert_close(ours.norm, theirs.norm, rtol=2e-6, atol=0)
        grads[4][-1] = math.nan
        ours, theirs = kernels.grad_stats(grads, order), PORTABLE.grad_stats(grads, order)
        assert (
            ours.nonfinite.tolist() == theirs.nonfinite.tolist() == [float(i == 4) for i in range(len(grads))]
        )
        mine, other = [g.clone() for g in grads], [g.clone() for g in grads]
        flags = [torch.zeros((), device=DEVICE) for _ in range(2)]
        kernels.multiply_(mine, scalars()[0], flags[0])
        PORTABLE.multiply_(other, scalars()[0], flags[1])
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
        assert [f.item() for f in flags] == [1.0, 1.0]


@pytest.mark.slow
def test_more_elements_than_int32(kernels: Kernels) -> None:
    """A tensor beyond 2**31 elements is read, multiplied or cast at the wrong places."""
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    large = torch.zeros(2**31 + 70_001, dtype=torch.bfloat16, device=DEVICE)
    places = [0, 2**31 - 1, 2**31, 2**31 + 70_000]
    for place in places:
        large[place] = 3.0
    assert kernels.grad_stats([large]).norm.item() == pytest.approx(6.0)
    kernels.multiply_([large], *scalars())
    (cast,) = kernels.cast([large], torch.float16)
    assert [large[p].item() for p in places] == [1.5] * 4
    assert [cast[p].item() for p in places] == [1.5] * 4
    assert kernels.grad_stats([cast]).norm.item() == pytest.approx(3.0)
    large[-1] = math.inf
    assert kernels.grad_stats([large]).found_inf.item() == 1.0


@pytest.mark.parametrize("value", [1e15, 1e11, 1e-11, 1e-15, 1e-40])
def test_many_large_or_small_elements(kernels: Kernels, value: float) -> None:
    """The sum over all chunks leaves float32 though each chunk's own does not."""
    value = torch.tensor(value).item()  # as float32 holds it
    grads = [torch.full((2**26,), value, device=DEVICE), torch.full((5,), value, device=DEVICE)]
    measured = kernels.grad_stats(grads)
    assert measured.norm.item() == pytest.approx(value * math.sqrt(2**26 + 5), rel=1e-5)
    assert measured.norms.tolist() == pytest.approx([value * 2**13, value * math.sqrt(5)], rel=1e-5)
    assert measured.found_inf.item() == 0.0


def test_launches(kernels: Kernels) -> None:
    """A list of tensors costs a launch a tensor, or the table of addresses is copied at every call."""
    grads = gradients(shapes=BLOCK * 16) + gradients(torch.bfloat16)
    ready = kernels.prepare(grads)
    factor, found = scalars()
    out = [torch.empty_like(g, dtype=torch.float16) for g in grads]
    moved = state()
    assert launches(lambda: kernels.grad_stats(ready)) == {
        "measure_rows": 2, "measure_tensors": 1, "measure_total": 1
    }  # fmt: skip
    assert launches(lambda: kernels.multiply_(ready, factor, found)) == {"scale_rows": 2}
    assert launches(lambda: kernels.cast(grads, torch.float16, out)) == {"move_rows": 2}
    assert launches(lambda: kernels.update_scale_(moved, found, LossScaleSchedule())) == {"update_scale": 1}


def test_launches_of_cached_casts(kernels: Kernels) -> None:
    """Weights that one kernel casts are cast by a launch each, as torch's autocast does."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(30)]).to(DEVICE)
    weights = [p.detach() for p in model.parameters()]
    x = torch.randn(8, 64).to(DEVICE)

    def forward() -> None:
        torch._foreach_mul_(weights, 1.0)  # an optimizer's step: all casts are stale
        with amp_core.autocast(DEVICE, dtype=torch.bfloat16):
            model(x)

    with amp_core.cached_casts(model):
        ran = launches(forward)
    assert ran["move_rows"] == 1, ran


def test_no_kernel_waits(kernels: Kernels) -> None:
    """A new list of tensors, or new addresses, make the host wait for the GPU."""
    factor, found = scalars()
    kernels.grad_stats(gradients())
    for count in (3, 7, 7, 9):
        grads = gradients(shapes=BLOCK[:count])
        with no_waits():
            kernels.grad_stats(grads)
            kernels.multiply_(grads, factor, found)
            kernels.cast(grads, torch.bfloat16)


def test_another_stream(kernels: Kernels) -> None:
    """A table written on one stream is read on another before it is there, or after it was freed."""
    grads = gradients()
    expected = kernels.grad_stats(grads).norm.item()
    streams = [torch.cuda.Stream() for _ in range(4)]
    for _ in range(20):
        results = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append(kernels.grad_stats([g.clone() for g in grads]).norm)
        torch.cuda.synchronize()
        assert [r.item() for r in results] == [expected] * len(streams)


# -- whole steps -----------------------------------------------------------------------------------


class Training:
    """A small model with its optimizer and scaler; `step` is what a user writes."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, overlap: bool = False, **optimizer: object
    ) -> None:
        torch.manual_seed(3)
        layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8)]
        self.model = nn.Sequential(*layers).to(DEVICE, dtype)
        options = {"lr": 1e-3, "fused": True, **optimizer}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)  # type: ignore[arg-type]
        self.scaler = amp_core.GradScaler(DEVICE, init_scale=1024.0, growth_interval=3, overlap=overlap)
        self.x = torch.randn(32, 64).to(DEVICE)

    def step(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        with amp_core.autocast(DEVICE, dtype=torch.float16):
            loss = self.model(self.x).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer, max_norm=0.1)
        self.scaler.update()

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_whole_step_without_waiting(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with a fused optimizer makes the host wait for the GPU (scale, clip, step, update, history)."""
    monkeypatch.setattr(overlapping, "_bucket_nbytes", lambda _: 2**14)  # several for this small model
    training = Training(overlap=overlap)
    for _ in range(3):
        training.step()
    with no_waits():
        for _ in range(3):
            training.step()
    assert len(training.scaler.history) == 6
    assert not any(record.skipped for record in training.scaler.history)


def test_losses_and_weights_on_the_cpu() -> None:
    """The host would read the scale, or an overflow, before the GPU has written it."""
    near, far = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = torch.optim.SGD([near, far], lr=1.0)
    scaler = amp_core.GradScaler(DEVICE, 8.0)
    scaler.scale(far.sum()).backward()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # cycles, about half a second
    scaler.update(torch.full((), 4.0, device=DEVICE))
    assert scaler.scale(torch.ones(())).item() == 4.0
    near.grad = torch.full_like(near, math.inf)
    torch.cuda._sleep(1_000_000_000)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert near.tolist() == far.tolist() == [1.0] * 3


def test_clipping_without_waiting() -> None:
    """clip_grad_norm_ or unscale_ by themselves make the host wait."""
    training = Training()
    training.step()
    for call in (
        lambda: training.scaler.clip_grad_norm_(training.optimizer, 1.0),
        lambda: training.scaler.unscale_(training.optimizer),
    ):
        training.scaler.scale(training.model(training.x).sum()).backward()
        with no_waits():
            call()
            training.scaler.step(training.optimizer)
            training.scaler.update()


def captured(training: Training) -> torch.cuda.CUDAGraph:
    """Warm up on a side stream, as torch's documentation says, and capture one step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            training.step()
    torch.cuda.current_stream().wait_stream(stream)
    training.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.step()
    return graph


@pytest.mark.parametrize("disturbed", [False, True])
def test_a_captured_step(disturbed: bool) -> None:
    """A replayed step differs from an eager one, or reads tables that others overwrote meanwhile."""
    eager, replayed = Training(capturable=True), Training(capturable=True)
    graph = captured(replayed)
    for _ in range(3):
        eager.step()
    for number in range(8):
        batch = torch.full((32, 64), math.inf if number == 3 else 0.1 * number).to(DEVICE)
        eager.x.copy_(batch)
        replayed.x.copy_(batch)
        if disturbed:
            gc.collect()
            others = Training()
            others.step()
            del others
            torch.cuda.empty_cache()
            torch.full((1 << 20,), -1, dtype=torch.int64, pin_memory=True)  # into freed host memory
        eager.step()
        graph.replay()
        assert replayed.scaler._scale is not None
        assert replayed.scaler._scale.item() == eager.scaler.get_scale()
        for one, other in zip(replayed.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
            assert one.isfinite().all()


def test_a_captured_step_that_keeps_its_gradients() -> None:
    """Gradients at fixed addresses are copied into tables that only the eager steps had."""
    training = Training(capturable=True)
    training.step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            training.step(set_to_none=False)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.step(set_to_none=False)
    before = training.parameters()
    graph.replay()
    assert any(not torch.equal(a, b) for a, b in zip(before, training.parameters(), strict=True))
    assert all(p.isfinite().all() for p in training.parameters())


@pytest.mark.parametrize("fused", [True, False])
def test_bfloat16_gradients(fused: bool) -> None:
    """The scaler of torch cannot unscale them on a GPU: "not implemented for 'BFloat16'"."""
    training = Training(torch.bfloat16, fused=fused)
    before = training.parameters()
    training.x = training.x.bfloat16()
    training.step()
    assert training.scaler.last_step[training.optimizer].skipped is False
    assert any(not torch.equal(a, b) for a, b in zip(before, training.parameters(), strict=True))
    training.x.fill_(math.inf)
    before = training.parameters()
    training.step()
    assert all(torch.equal(a, b) for a, b in zip(before, training.parameters(), strict=True))
    assert training.scaler.get_scale() == 512.0


def test_a_step_agrees_with_torch() -> None:
    """The clipped step of a GPU differs from unscale_, clip_grad_norm_ and step of torch.amp."""
    ours, theirs = Training(), Training()
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=3)
    for _ in range(5):
        ours.step()
        theirs.optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss = theirs.model(theirs.x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(theirs.optimizer)
        nn.utils.clip_grad_norm_(theirs.model.parameters(), 0.1)
        scaler.step(theirs.optimizer)
        scaler.update()
        assert ours.scaler.get_scale() == scaler.get_scale()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_several_gpus() -> None:
    """A launch goes to the current GPU instead of the tensors', or one GPU's flag is not seen on another."""
    first, second = (nn.Linear(16, 16).to(f"cuda:{i}") for i in range(2))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    scaler = amp_core.GradScaler(DEVICE, init_scale=8.0)
    for bad in (False, True):
        x = torch.ones(4, 16, device="cuda:0")
        loss = second(first(x).to("cuda:1")).sum()
        scaler.scale(loss).backward()
        if bad:
            assert second.weight.grad is not None
            second.weight.grad[0, 0] = math.inf
        before = first.weight.detach().clone()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        assert torch.equal(before, first.weight) is bad
        optimizer.zero_grad()
    assert scaler.get_scale() == 4.0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_data_parallel() -> None:
    """Regions inside of a module are lost in DataParallel's threads, or its gradients are not used."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 8)

        @amp_core.autocast(DEVICE, dtype=torch.float16)
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            assert y.dtype is torch.float16
            return y

    model = nn.DataParallel(Inside().to("cuda:0"), device_ids=[0, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp_core.GradScaler(DEVICE)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(model(torch.ones(4, 16, device="cuda:0")).float().sum()).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
