"""Recipes of convolutions and grouped products: one scale per tensor, forward and backward."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import amp_core
from amp_core import OpPolicy, PolicyError, Recipe, autocast, delayed_scales, quantize
from amp_core.dispatch.work import work
from amp_core.formats import E4M3, Quantization

LOW = torch.bfloat16
CPU = OpPolicy.default("cpu")
RECIPE = Recipe.fp8_tensorwise()
OFFSETS = torch.tensor([8, 8, 24], dtype=torch.int32)

CASES: dict[str, tuple[str, Callable[..., Tensor], tuple[int, ...], tuple[int, ...], int]] = {
    "conv1d": ("conv1d", F.conv1d, (2, 3, 9), (4, 3, 3), 4),
    "conv2d": (
        "conv2d",
        lambda x, w, b=None: F.conv2d(x, w, b, stride=(2, 1), padding=1, groups=2),
        (2, 4, 7, 6),
        (6, 2, 3, 3),
        6,
    ),
    "same": ("conv2d", lambda x, w, b=None: F.conv2d(x, w, b, padding="same"), (3, 7, 6), (6, 3, 3, 3), 6),
    "conv3d": (
        "conv3d",
        lambda x, w, b=None: F.conv3d(x, w, b, dilation=2),
        (1, 2, 5, 5, 5),
        (3, 2, 2, 2, 2),
        3,
    ),
    "transposed": (
        "conv_transpose2d",
        lambda x, w, b=None: F.conv_transpose2d(x, w, b, stride=2, output_padding=1),
        (2, 4, 5, 5),
        (4, 3, 3, 3),
        3,
    ),
    "grouped": (
        "_grouped_mm",
        lambda x, w, _=None: torch._grouped_mm(x, w, offs=OFFSETS),
        (24, 16),
        (3, 16, 8),
        0,
    ),
}


@pytest.mark.parametrize("kept", [None, "input", "weight", "grad_output"])
@pytest.mark.parametrize("case", CASES)
def test_the_three_products_written_out(case: str, kept: str | None) -> None:
    """A product has the operands of another role, or is rounded on its way."""
    recipe = replace(RECIPE, name="own", **{kept: None}) if kept else RECIPE

    def rounded(x: Tensor, role: str) -> Tensor:
        return x.float() if role == kept else quantize(x, getattr(recipe, role)).dequantize()

    torch.manual_seed(0)
    op, call, *shapes, channels = CASES[case]
    x, w = (torch.randn(shape).to(LOW).requires_grad_() for shape in shapes)  # type: ignore[arg-type]
    bias = torch.randn(channels).to(LOW).requires_grad_() if channels else None
    with autocast("cpu", dtype=LOW, policy=CPU.override({op: recipe})):
        y = call(x, w, bias)
    grad = torch.randn(y.shape).to(LOW)
    y.backward(grad)

    a, b = (rounded(t.detach(), role).requires_grad_() for t, role in ((x, "input"), (w, "weight")))
    exact = call(a, b)
    wanted = exact if bias is None else exact + bias.detach().view(-1, *[1] * (w.dim() - 2))
    assert y.dtype is LOW
    assert torch.equal(y, wanted.to(LOW))
    for mine, theirs in zip(
        (x.grad, w.grad), torch.autograd.grad(exact, (a, b), rounded(grad, "grad_output")), strict=True
    ):
        assert mine is not None
        assert torch.equal(mine, theirs.to(LOW))
    if bias is not None:
        assert bias.grad is not None
        torch.testing.assert_close(
            bias.grad, grad.transpose(0, -len(w.shape) + 1).flatten(1).sum(1), rtol=0.02, atol=0.02
        )


@pytest.mark.parametrize("case", CASES)
def test_a_comparison_counts_the_work_of_products(case: str) -> None:
    """The work of a convolution is that of one product of its input with the last size of its weight."""
    op, call, *shapes, _ = CASES[case]
    x, w = (torch.ones(shape).to(LOW) for shape in shapes)  # type: ignore[arg-type]
    compared = amp_core.compare(lambda: call(x, w).float().sum(), policy=CPU.override({op: RECIPE}))
    with FlopCounterMode(display=False) as counter:
        call(x, w)
    assert sum(compared.work.values()) == (
        2 * 24 * 16 * 8 if case == "grouped" else counter.get_total_flops()
    )


@pytest.mark.parametrize("op", ["conv2d", "conv_transpose1d", "_grouped_mm"])
@pytest.mark.parametrize(
    "name", [name for name in Recipe.names() if name not in ("fp8_tensorwise", "fp8_delayed")]
)
def test_finer_scales_are_refused_in_words(op: str, name: str) -> None:
    """A rule is accepted for which nothing is defined."""
    with pytest.raises(PolicyError, match="it takes one scale per tensor") as raised:
        CPU.override({op: Recipe.named(name)})
    assert ("only the device knows" if "group" in op else "unfolded patches") in str(raised.value)
    rotated = replace(RECIPE, weight=Quantization(E4M3, hadamard=16))
    with pytest.raises(PolicyError, match="the weight of this recipe is e4m3 per tensor after a Hadamard"):
        CPU.override({op: rotated})


def test_a_network_trains_with_scopes_and_delayed_scales() -> None:
    """A checkpoint, a cached cast, a history or the counts of a record miss convolutions."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    x = torch.randn(5, 3, 6, 6)

    def gradients(policy: OpPolicy, *, again: bool = False) -> list[Tensor]:
        mine = copy.deepcopy(net)
        with (
            amp_core.cached_casts(mine),
            delayed_scales(mine) as scales,
            autocast("cpu", dtype=LOW, policy=policy),
            amp_core.record(mine) as r,
        ):
            y = torch.utils.checkpoint.checkpoint(mine, x, use_reentrant=False) if again else mine(x)
            y.float().square().mean().backward()
        assert {key.place.module for key in r.quantized} == {"0"}
        names = {*scales.state_dict()}
        assert names == ({"0.weight"} if "delayed" in policy.rule("conv2d") else set())
        return [p.grad for p in mine.parameters() if p.grad is not None]

    plain = CPU.override({"conv2d": RECIPE})
    first = gradients(plain)
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(plain, again=True), strict=True))
    delayed = gradients(CPU.override({"conv2d": Recipe.fp8_delayed()}))  # the first step's are current
    assert all(torch.equal(a, b) for a, b in zip(first, delayed, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["conv2d", "grouped"])
def test_compiled_products(case: str) -> None:
    """A graph breaks, or its gradients are others."""
    op, call, *shapes, _ = CASES[case]
    policy = CPU.override({op: RECIPE})

    def run(x: Tensor, w: Tensor) -> Tensor:
        with autocast("cpu", dtype=LOW, policy=policy):
            return call(x.sin(), w)

    def gradients(function: Any) -> list[Any]:
        torch.manual_seed(0)
        leaves = [torch.randn(shape).requires_grad_() for shape in shapes]  # type: ignore[arg-type]
        function(*leaves).float().square().sum().backward()
        return [t.grad for t in leaves]

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for mine, theirs in zip(gradients(compiled), gradients(run), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("a", "b"),
    [((24, 16), (3, 16, 8)), ((16, 24), (24, 8)), ((3, 4, 16), (16, 24)), ((3, 4, 16), (3, 16, 8))],
)
def test_shapes_of_grouped_products_in_graphs(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """A graph is traced with other shapes than it has when it runs."""
    policy = CPU.override({"_grouped_mm": RECIPE})
    offsets = None if len(a) == len(b) == 3 else OFFSETS

    def products(mode: Any) -> list[tuple[torch.Size, torch.dtype]]:
        with mode:
            x, w = (torch.ones(shape, dtype=LOW, requires_grad=True) for shape in (a, b))
            with autocast("cpu", dtype=LOW, policy=policy):
                y = torch._grouped_mm(x, w, offs=offsets)
            y.sum().backward()
            assert x.grad is not None
            assert w.grad is not None
        return [(t.shape, t.dtype) for t in (y, x.grad, w.grad)]

    plain = contextlib.nullcontext()
    fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    assert products(fake) == products(plain)


def test_torch_decides_on_the_bias_of_a_grouped_product() -> None:
    """A recipe adds a bias that torch does not support; one for each group ends in an error of shapes."""
    x, w = torch.ones(24, 16), torch.ones(3, 16, 8)
    for rule in (RECIPE, "lower_precision_fp"):
        policy = CPU.override({"_grouped_mm": rule})
        with autocast("cpu", policy=policy), pytest.raises(RuntimeError, match="Bias not supported"):
            torch._grouped_mm(x, w, offs=OFFSETS, bias=torch.ones(8))


def test_the_work_of_grouped_products() -> None:
    """A threshold takes grouped products for small ones."""
    op = torch.ops.aten._grouped_mm.default
    every = torch.empty(24, 16), torch.empty(3, 16, 8)
    assert work(op, [*every, OFFSETS], {}) == 2 * 24 * 16 * 8
    assert work(op, [torch.empty(16, 24), torch.empty(24, 8), OFFSETS], {}) == 2 * 24 * 16 * 8
    assert work(op, [torch.empty(3, 4, 16), torch.empty(3, 16, 8)], {}) == 2 * 3 * 4 * 16 * 8
    assert work(op, [torch.empty(3, 4, 16), torch.empty(16, 24), OFFSETS], {}) == 2 * 4 * 16 * 24
