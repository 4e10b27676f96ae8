"""Gradients of another dtype than their weights: ``Tensor.grad_dtype``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_core
from amp_core import AccumulationWindow, GradScaler, autocast, cached_casts, master_weights

pytestmark = pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no grad_dtype")

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
X = torch.linspace(-1, 1, 24).reshape(4, 6)


def make(dtype: torch.dtype, grad_dtype: torch.dtype | None, width: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 3)).to(dtype)
    for param in model.parameters():
        param.grad_dtype = grad_dtype
    return model


def backward(model: nn.Module, scale: Callable[[Tensor], Tensor] = lambda loss: loss) -> None:
    x = X.to(next(model.parameters()).dtype)
    scale(model(x).float().square().mean()).backward()


def grads_of(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) > 0 and all(
        a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )


def train(scaler: Any, options: dict[str, Any], bad: int, clip: bool) -> tuple[Any, ...]:
    """Take four steps, one of them with an overflow; return what they left."""
    model = make(BF16, FP32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    scale = scaler("cpu", init_scale=256.0, growth_interval=2)
    seen: list[Tensor] = []
    for i in range(4):
        optimizer.zero_grad()
        backward(model, scale.scale)
        assert {g.dtype for g in grads_of(model)} == {FP32}
        if i == bad:
            model[0].bias.grad[1] = float("inf")
        if clip:
            scale.unscale_(optimizer)
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            seen += grads_of(model)
        scale.step(optimizer)
        scale.update()
    return [p.detach() for p in model.parameters()], seen, scale.get_scale()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"momentum": 0.9}], ids=str)
def test_float32_gradients_of_bfloat16_weights_as_in_torch(options: dict[str, Any], clip: bool) -> None:
    """The scaler refuses, rounds or skips gradients that are wider than their weights."""
    for bad in (9, 2):
        ours, theirs = (train(s, options, bad, clip) for s in (GradScaler, torch.amp.GradScaler))
        assert ours[2] == theirs[2]
        assert same(ours[0], theirs[0])
        for our, their in zip(ours[1], theirs[1], strict=True):
            torch.testing.assert_close(our, their, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("fused", [False, True])
def test_a_clipping_step_on_float32_gradients(fused: bool) -> None:
    """`step(max_norm=...)` measures the gradients in the dtype of the weights, or half of a step is taken."""
    model, clipped = make(BF16, FP32), make(BF16, FP32)
    before = [p.detach().clone() for p in model.parameters()]
    backward(clipped)
    norm = nn.utils.clip_grad_norm_(clipped.parameters(), 0.1)
    torch.optim.SGD(clipped.parameters(), lr=1.0).step()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    scaler = GradScaler("cpu", 256.0)
    backward(model, scaler.scale)
    if fused:  # torch's fused kernels want one dtype
        with pytest.raises(RuntimeError, match="expected scalar type BFloat16 but found Float"):
            scaler.step(optimizer, max_norm=0.1)
        assert same([p.detach() for p in model.parameters()], before)
        return
    scaler.step(optimizer, max_norm=0.1)
    scaler.update()
    assert scaler.history[-1].total_norm == pytest.approx(float(norm), rel=1e-5)
    assert float(norm) > 0.1
    for ours, theirs in zip(model.parameters(), clipped.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("keep", [cached_casts, master_weights])
@pytest.mark.parametrize("grad_dtype", [FP32, None, BF16])
def test_weights_that_are_bfloat16_already(grad_dtype: torch.dtype | None, keep: Any) -> None:
    """A scope casts weights that need no cast, and their float32 gradients are rounded."""
    results = []
    for scope in (None, keep):
        model = make(BF16, grad_dtype)
        with scope(model) if scope else nullcontext():
            for _ in range(2):
                with autocast("cpu"):
                    backward(model)
        results.append(grads_of(model))
    assert same(results[1], results[0])
    assert {g.dtype for g in results[0]} == {grad_dtype or BF16}


@pytest.mark.parametrize("keep", [cached_casts, master_weights])
@pytest.mark.parametrize("width", [5, 20000], ids=["small", "large"])
@pytest.mark.parametrize("grad_dtype", [FP32, None, BF16, torch.float16, FP64])
def test_kept_casts_give_the_gradients_of_autocast(
    grad_dtype: torch.dtype | None, width: int, keep: Any
) -> None:
    """A scope sets a gradient of a dtype that the weight does not admit, and the backward pass raises."""
    results = []
    for scope in (None, keep):
        model = make(FP32, grad_dtype, width)
        collected = []
        with scope(model) if scope else nullcontext():
            for _ in range(3):
                with autocast("cpu"):
                    backward(model)
                collected += grads_of(model)
        results.append(collected)
    assert same(results[1], results[0])
    assert {g.dtype for g in results[0]} == {grad_dtype or FP32}


@pytest.mark.parametrize("leave_out", [False, True])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"), [(BF16, FP32), (BF16, None), (FP32, BF16), (FP32, FP64)], ids=str
)
def test_a_window_sums_in_the_dtype_of_the_gradients(
    dtype: torch.dtype, grad_dtype: torch.dtype | None, leave_out: bool
) -> None:
    """A window sums micro-batches in the dtype of the weights, or sets gradients that torch refuses."""
    results = []
    for windowed in (False, True):
        model = make(dtype, grad_dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu", 16.0)
        window = AccumulationWindow(scaler, optimizer, leave_out=leave_out)
        if windowed:
            with window:
                for _ in range(3):
                    with window.micro_batch():
                        backward(model, scaler.scale)
        else:
            for _ in range(3):
                backward(model, scaler.scale)
        results.append(grads_of(model))
        if dtype is BF16:
            scaler.step(optimizer)
            assert not scaler.last_step[optimizer].skipped
    assert same(results[1], results[0])
    assert {g.dtype for g in results[1]} == {grad_dtype or dtype}


def test_half_gradients_of_float32_weights_are_refused_as_in_torch() -> None:
    """float16 gradients underflow when they are unscaled in place; only their dtype tells."""
    for scaler in (torch.amp.GradScaler("cpu"), amp_core.GradScaler("cpu")):
        model = make(FP32, torch.float16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model, scaler.scale)
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.unscale_(optimizer)
