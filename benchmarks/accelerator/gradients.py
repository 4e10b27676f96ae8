"""Unscaling, the overflow check, clipping and the step, on an accelerator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

import amp_core
from benchmarks.ab import Ratio
from benchmarks.accelerator import compare_on, tensors_on
from benchmarks.gradients import NoStep
from benchmarks.shapes import gpt, gpt2_small, many

Shapes = list[tuple[int, ...]]
MODELS = {
    "200 tensors of 1k": many(200),
    "2000 tensors of 1k": many(2000),
    "GPT-2 small, 124 M": gpt2_small(),
    "GPT, 1.0 B": gpt(18, 2048),
}
FUSED, FOREACH = {"fused": True}, {"foreach": True}


def run(device: str, models: dict[str, Shapes] | None = None) -> Iterator[Ratio]:
    """Compare whole steps and single passes, for small and large models."""
    for name, shapes in (models or MODELS).items():
        calls = 3 if elements(shapes) > 5e8 else 20
        adamw = torch.optim.AdamW
        # The bytes are counted in docs/explanation/gradient-passes.md.
        for title, theirs, ours in (
            ("no-op, clip (12 of 20 B a parameter)", (NoStep, {}), (NoStep, {})),
            ("AdamW fused, clip (36 of 48 B a parameter)", (adamw, FUSED), (adamw, FUSED)),
            ("AdamW foreach against ours fused, clip (36 of 92 B)", (adamw, FOREACH), (adamw, FUSED)),
        ):
            yield _steps(device, f"{name}, {title}", shapes, calls, theirs, ours)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield from _passes(device, name, shapes, dtype, calls)


def elements(shapes: Shapes) -> int:
    """Return how many elements there are."""
    return sum(torch.Size(s).numel() for s in shapes)


def _steps(
    device: str, name: str, shapes: Shapes, calls: int, theirs: tuple[Any, Any], ours: tuple[Any, Any]
) -> Ratio:
    # Each side has its own parameters: both touch the same amount of memory.
    scalers = (torch.amp.GradScaler(device, 1.0), amp_core.GradScaler(device, 1.0))
    sides = []
    for scaler, (kind, options) in zip(scalers, (theirs, ours), strict=True):
        params = [torch.nn.Parameter(t) for t in tensors_on(device, shapes)]
        for param, grad in zip(params, tensors_on(device, shapes), strict=True):
            param.grad = grad
        scaler.scale(torch.ones((), device=device))
        sides.append(_step(scaler, kind(params, lr=1e-6, **options), params))
    return compare_on(device, name, *sides, calls=calls)


def _step(scaler: Any, optimizer: Any, params: list[torch.nn.Parameter]) -> Callable[[], None]:
    def ours() -> None:
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()

    def theirs() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return ours if isinstance(scaler, amp_core.GradScaler) else theirs


def _passes(device: str, name: str, shapes: Shapes, dtype: torch.dtype, calls: int) -> Iterator[Ratio]:
    """Compare the passes over the gradients with a copy of as many bytes: the name tells the bandwidths."""
    grads = tensors_on(device, shapes, dtype)
    size = sum(g.nbytes for g in grads)
    plain = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(plain)
    kernels = amp_core.get_backend(device).kernels()
    ready = kernels.prepare(grads)
    one, found = torch.ones((), device=device), torch.zeros((), device=device)
    passes: dict[str, tuple[int, Callable[[], object]]] = {
        "read pass": (1, lambda: kernels.grad_stats(ready)),
        "multiply_": (2, lambda: kernels.multiply_(ready, one, found)),
    }
    short = str(dtype).removeprefix("torch.")
    for title, (streams, ours) in passes.items():
        ratio = compare_on(device, "", lambda: target.copy_(plain), ours, calls=calls)
        copied, moved = 2 * size / ratio.theirs, streams * size / ratio.ours
        text = f"{name} {short}: {title} at {moved / 1e9:.0f} GB/s, a copy at {copied / 1e9:.0f} GB/s"
        yield dataclasses.replace(ratio, name=f"{text}, {moved / copied:.0%} of it")
