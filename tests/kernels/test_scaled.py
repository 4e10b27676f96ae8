"""Products by ``torch.nn.functional.scaled_mm``: the real op on the CPU, its arguments for CUDA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import amp_core
from amp_backend_cuda.scaled import CudaScaledProducts
from amp_core import OpPolicy, Quantization, Recipe, autocast
from amp_core._torch.tracing import fake_tensor_mode
from amp_core.formats import E2M1, E4M3, E5M2, ElementFormat, quantize
from amp_core.kernels import EMULATED, torch_scaled
from amp_core.kernels.scaled import emulated
from amp_core.kernels.torch_scaled import TorchScaledProducts
from amp_core.testing import Loopback, check

on_the_cpu = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="this torch has scaled_mm for GPUs alone",
)


class OfTheCpu(TorchScaledProducts):
    """What torch's CPU op takes."""

    def lacks(self, kind: str, *_: Any) -> str:
        return "" if kind in ("tensor", "row") else "not on a CPU"


def operands(recipe: Recipe, name: Literal["output", "grad_weight"], m: int, k: int, n: int) -> list[Any]:
    hows = recipe.operands(name)
    tensors = torch.randn(m, k), torch.randn(k, n)
    return [
        quantize(x, how, dim, seed=1, amax=torch.tensor(5.0) if how.found != "current" else None)
        for x, how, dim in zip(tensors, hows, (-1, -2), strict=True)
        if how is not None
    ]


@on_the_cpu
def test_the_kit_passes_with_torchs_op() -> None:
    """Padding, layouts or scales are not those that torch's op takes."""

    class Native(Loopback):
        def scaled_products(self) -> OfTheCpu:
            return OfTheCpu()

    report = check(Native(), areas=["quantize"])
    assert report.ok, report.to_markdown()


@on_the_cpu
@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise", "fp8_delayed"])
@pytest.mark.parametrize("shape", [(16, 32, 16), (33, 257, 5), (1, 1, 1)])
def test_torchs_op_on_a_cpu_is_what_we_emulate(name: str, shape: tuple[int, int, int]) -> None:
    """The CPU's reason to emulate would not be true: its op gives other results."""
    torch.manual_seed(0)
    for product in ("output", "grad_weight"):
        a, b = operands(Recipe.named(name), product, *shape)  # type: ignore[arg-type]
        ours, torchs = (p.multiply(a, b, torch.float32) for p in (EMULATED, OfTheCpu()))
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)


@on_the_cpu
@pytest.mark.parametrize("granularity", ["row", 32, (16, 16)])
@pytest.mark.parametrize("element", [E2M1, E4M3])
def test_two_scales_that_torchs_op_does_not_take(element: ElementFormat, granularity: Any) -> None:
    """The second scale of an operand is left out of its products."""
    how = Quantization(element, granularity, "e4m3")
    torch.manual_seed(0)
    a = quantize(torch.randn(8, 64) * 100.0, how)
    b = quantize(torch.randn(64, 8), how, -2)
    found, wanted = (products.multiply(a, b, torch.float32) for products in (OfTheCpu(), EMULATED))
    assert torch.equal(found, wanted)


@on_the_cpu
@pytest.mark.parametrize("sizes", [(16, None), (None, 16), (16, 32)])
def test_operands_that_are_transformed_otherwise(sizes: tuple[int | None, int | None]) -> None:
    """Transforms that do not cancel out stay in the product."""
    torch.manual_seed(0)
    how = Recipe.fp8_rowwise().weight
    assert how is not None
    a, b = (
        quantize(torch.randn(shape), replace(how, hadamard=size), dim)
        for shape, size, dim in zip(((8, 64), (64, 8)), sizes, (-1, -2), strict=True)
    )
    found, wanted = (products.multiply(a, b, torch.float32) for products in (OfTheCpu(), EMULATED))
    assert torch.equal(found, wanted)
    torch.testing.assert_close(found, a.dequantize() @ b.dequantize(), rtol=1e-4, atol=1e-4)


@on_the_cpu
def test_a_region_uses_what_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A native product is not used, is used for what it cannot multiply, or trains another model."""
    called = list[torch.Size]()
    right = nn.functional.scaled_mm

    def counted(a: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        called.append(a.shape)
        return right(a, *args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_mm", counted)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 3)), torch.randn(7, 40)

    def gradients(rule: str) -> list[Tensor]:
        model.zero_grad()
        policy = OpPolicy.default("cpu").override({"linear": rule})
        with amp_core.cached_casts(model), autocast("cpu", torch.bfloat16, policy=policy):
            loss = model(x).float().square().mean()
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for rule, calls in (("recipe fp8_rowwise", 5), ("recipe fp8_tensorwise", 5), ("recipe mxfp8", 0)):
        wanted = gradients(rule)
        assert not called
        with monkeypatch.context() as patch:
            patch.setattr(type(amp_core.get_backend("cpu")), "scaled_products", lambda _: OfTheCpu())
            found = gradients(rule)
        assert len(called) == calls  # the first layer's input needs no gradient
        called.clear()
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        ((8, 0), []),
        ((8, 9), ["fp8_tensorwise", "fp8_rowwise", "fp8_delayed"]),
        ((9, 0), ["fp8_tensorwise", "fp8_rowwise", "fp8_delayed"]),
        ((10, 0), ["fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "mxfp8", "nvfp4"]),
    ],
)
def test_what_a_gpu_has(capability: tuple[int, int], native: list[str]) -> None:
    """A kernel is called that the GPU lacks, or is emulated without a reason."""
    products = CudaScaledProducts(capability)
    reasons = {name: emulated(products, Recipe.named(name)) for name in Recipe.names()}
    assert [name for name, each in reasons.items() if not each] == native
    assert set(emulated(products, Recipe.fp8_rowwise(), batched=True)) == {
        "output",
        "grad_input",
        "grad_weight",
    }
    if capability < (8, 9):
        assert "needs" not in reasons["mxfp4"]["output"]
        assert reasons["fp8_rowwise"]["output"] == (
            "row products need compute capability 8.9, and a GPU has 8.0"
        )


@pytest.mark.parametrize(
    ("element", "change", "reason"),
    [
        (E4M3, {"dtype": torch.float8_e4m3fnuz, "bias": 8, "max": 240.0}, "no torch.float8_e4m3fnuz"),
        (E4M3, {"dtype": torch.float16}, "no such pair"),
        (E4M3, {"max": 240.0}, ""),
        (E5M2, {"max": 49152.0}, "no e5m2 by e5m2"),
    ],
)
def test_own_formats_on_a_gpu(element: ElementFormat, change: dict[str, Any], reason: str) -> None:
    """A format of one's own goes to a native product in a dtype that CUDA lacks, and a step fails."""
    own = Quantization(replace(element, name="own", **change))
    said = CudaScaledProducts((9, 0)).why_emulated(own, own, torch.float32)
    assert reason in said
    assert bool(said) == bool(reason)


@on_the_cpu
@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(16, 64, 16), (200, 100, 33), (1, 1, 1)])
def test_cuda_takes_the_arguments(
    name: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks of torch, which need no GPU, refuse a layout, a size or an order of scales."""
    right = nn.functional.scaled_mm

    def on_a_gpu(value: Any) -> Any:
        if isinstance(value, list):
            return [*map(on_a_gpu, value)]
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    def checked(*args: Any, output_dtype: torch.dtype) -> Tensor:
        with fake_tensor_mode():
            result = right(*map(on_a_gpu, args), output_dtype=output_dtype)
        return torch.zeros(result.shape, dtype=result.dtype)

    monkeypatch.setattr(nn.functional, "scaled_mm", checked)
    for product in ("output", "grad_weight"):
        a, b = operands(Recipe.named(name), product, *shape)  # type: ignore[arg-type]
        result = CudaScaledProducts((10, 0)).multiply(a, b, torch.float32)
        assert result.shape == (shape[0], shape[2])
        assert result.dtype is torch.float32


def test_the_order_of_swizzled_scales() -> None:
    """A block gets the scale of another one; no CPU would notice."""
    scales = torch.arange(130 * 5).view(130, 5)
    tiles = torch_scaled._swizzled(scales).view(-1, 512)  # of 128 rows by 4 blocks
    for row in range(130):
        for block in range(5):
            tile, within = tiles[row // 128 * 2 + block // 4], row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            assert tile[within] == scales[row, block]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; there is none here")
def test_products_of_a_gpu() -> None:
    """What a GPU computes is not the product of the operands."""
    report = check(amp_core.get_backend("cuda"), areas=["quantize"])
    assert report.ok, report.to_markdown()
