"""Recipes quantise as torchao does, bit for bit, and its models and optimizers train in our regions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_core
from amp_core import Quantization, Recipe, quantize
from amp_core.formats import E2M1, E2M3, E3M2, E4M3, E5M2, ElementFormat

pytest.importorskip("torchao")
# Its import and enums warn about parts that we do not use.
pytestmark = pytest.mark.filterwarnings("ignore")

MX_NAMES = {
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    E3M2: "fp6_e3m2",
    E2M3: "fp6_e2m3",
    E2M1: torch.float4_e2m1fn_x2,
}
WIDE = [0.0, 2.0, 8.0]
"""Spreads of magnitudes, in powers of two."""


def data(spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(int(spread))
    x = torch.randn(128, 256, generator=generator)
    return x * torch.exp2(torch.randn(128, 256, generator=generator) * spread)


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether the bits are equal; theirs may hold scales in another shape."""
    return torch.equal(*(t.flatten().view(torch.uint8) for t in (ours, theirs)))


@pytest.mark.parametrize("spread", WIDE)
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dim", [None, -1, 0])
def test_fp8_tensorwise_and_rowwise(
    spread: float, element: ElementFormat, power_of_two: bool, dim: int | None
) -> None:
    """A model trained with torchao's fp8 gets other weights here."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    granularity = ScalingGranularity.TENSORWISE if dim is None else ScalingGranularity.AXISWISE
    x = data(spread)
    assert element.dtype is not None
    encode = tensor_to_scale(
        x,
        element.dtype,
        scaling_granularity=granularity,
        axiswise_dim=dim,
        round_scales_to_power_of_2=power_of_two,
    )
    scale = "power_of_two" if power_of_two else "float32"
    quantization = Quantization(element, "tensor" if dim is None else "row", scale)
    ours = quantize(x, quantization, -1 if dim is None else dim).packed()
    assert same(ours.values, to_fp8_saturated(x * encode, element.dtype))
    assert same(ours.scale, 1 / encode)


@pytest.mark.parametrize("spread", WIDE)
def test_tiles(spread: float) -> None:
    """DeepSeek's tiles differ from the kernels' reference."""
    from torchao.prototype.blockwise_fp8_training import kernels

    x, recipe = data(spread), Recipe.fp8_tiles()
    assert recipe.input is not None
    assert recipe.weight is not None
    values, scale = kernels.torch_blockwise_scale_act_quant_lhs(x)
    ours = quantize(x, recipe.input).packed()
    assert same(ours.values, values)
    assert same(ours.scale, scale)
    values, scale = kernels.torch_blockwise_scale_weight_quant(x)
    ours = quantize(x, recipe.weight).packed()
    assert same(ours.values, values)
    assert same(ours.scale, scale)


@pytest.mark.parametrize("spread", WIDE)
@pytest.mark.parametrize("scale", ["e8m0", "e8m0_up"])
@pytest.mark.parametrize("element", MX_NAMES, ids=lambda e: e.name)
def test_mx(spread: float, scale: str, element: ElementFormat) -> None:
    """MX data cannot be exchanged with torchao."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    mode = ScaleCalculationMode.FLOOR if scale == "e8m0" else ScaleCalculationMode.RCEIL
    x = data(spread)
    x[3, :64] = 0
    theirs, values = to_mx(x, MX_NAMES[element], 32, mode)
    ours = quantize(x, Quantization(element, 32, scale)).packed()
    assert same(ours.values, values)
    assert same(ours.scale, theirs)


@pytest.mark.parametrize("spread", WIDE)
def test_nvfp4(spread: float) -> None:
    """NVFP4 data cannot be exchanged with torchao. It raises scales to 2**-6: such blocks may differ."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    x = data(spread)
    outer = per_tensor_amax_to_scale(x.abs().max())
    theirs, values = nvfp4_quantize(x, 16, outer)
    ours = quantize(x, Quantization(E2M1, 16, "e4m3")).packed()
    assert ours.tensor_scale == outer
    normal = theirs.float() > 2.0**-6
    assert normal.any()
    assert same(ours.scale[normal], theirs[normal])
    blocks: Callable[[Tensor], Tensor] = lambda packed: packed.view(*normal.shape, 8)[normal]
    assert same(blocks(ours.values), blocks(values))


def test_where_the_specification_decides() -> None:
    """The rows of docs/reference/differences.md about torchao are out of date."""
    from torchao.float8.float8_utils import tensor_to_scale
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    tiny = torch.full((1, 32), 2.0**-125)
    _, values = to_mx(tiny, torch.float8_e4m3fn, 32)
    ours = quantize(tiny, Quantization(E4M3, 32, "e8m0"))
    assert torch.equal(ours.dequantize(), tiny)
    assert torch.equal(values.float() * 2, ours.values)
    overflowed = torch.full((1, 32), 1.0)
    overflowed[0, 0] = torch.inf
    _, values = to_mx(overflowed, torch.float8_e4m3fn, 32)
    assert values.float().isfinite().all()
    assert quantize(overflowed, Quantization(E4M3, 32, "e8m0")).dequantize().isnan().all()
    assert tensor_to_scale(torch.full((2,), 1e-20), torch.float8_e4m3fn) == torch.tensor(448e12)
    small = quantize(torch.full((2,), 1e-20), Quantization(E4M3))
    assert small.values.tolist() == [448.0, 448.0]


def _as_it_is(model: nn.Module) -> nn.Module:
    return model


def _float8(model: nn.Module) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))


def _int8(model: nn.Module) -> nn.Module:
    from torchao.prototype.quantized_training import int8_mixed_precision_training
    from torchao.quantization import quantize_

    quantize_(model, int8_mixed_precision_training())
    return model


def _int8_weights(model: nn.Module) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model[0], Int8WeightOnlyConfig())
    return model


def _trained(convert: Callable[[nn.Module], nn.Module], optimizer: str, module: Any, tool: Any) -> Tensor:
    import torchao.optim

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.LayerNorm(64), nn.Linear(64, 64)
    model = convert(nn.Sequential(*layers))
    trained = [p for p in model.parameters() if p.requires_grad]
    steps = getattr(torch.optim if optimizer == "AdamW" else torchao.optim, optimizer)(trained, 0.01)
    scaler, losses = module.GradScaler("cpu", init_scale=64.0), []
    with tool(model):
        for _ in range(3):
            with module.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(8, 64)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(steps)
            scaler.update()
            steps.zero_grad()
            losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW8bit"])
@pytest.mark.parametrize("convert", [_as_it_is, _float8, _int8, _int8_weights])
def test_models_and_optimizers(convert: Callable[[nn.Module], nn.Module], optimizer: str) -> None:
    """A tool read tensors of torchao's that can do no more than multiply, or a scope cast its weights."""
    expected = _trained(convert, optimizer, torch.amp, lambda _: nullcontext())
    tools = (
        lambda _: nullcontext(),
        amp_core.cached_casts,
        amp_core.master_weights,
        amp_core.watch,
        lambda _: amp_core.record(),
        lambda model: amp_core.guard(model, steps=range(9)),
    )
    for tool in tools:
        result = _trained(convert, optimizer, amp_core, tool)
        # Compiled optimizers run eagerly while every op is observed.
        torch.testing.assert_close(result, expected, rtol=1e-2 if optimizer == "AdamW8bit" else 0, atol=0)
