"""Casts of weights on an accelerator: one by one, together, and once over many regions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

import amp_core
from benchmarks.ab import Ratio
from benchmarks.accelerator import compare_on, tensors_on
from benchmarks.casts import Gpt
from benchmarks.shapes import gpt2_small


def run(device: str, small: bool = False) -> Iterator[Ratio]:
    """Compare the cast kernel, and models with and without `cached_casts`."""
    weights = tensors_on(device, gpt2_small()[3:15] if small else gpt2_small())
    kernels = amp_core.get_backend(device).kernels()
    for dtype in (torch.bfloat16, torch.float16):
        out = [torch.empty_like(w, dtype=dtype) for w in weights]
        yield compare_on(
            device,
            f"GPT-2 small: weights to {str(dtype).removeprefix('torch.')}, storage kept",
            lambda dtype=dtype: [w.to(dtype) for w in weights],  # type: ignore[misc]
            lambda dtype=dtype, out=out: kernels.cast(weights, dtype, out),  # type: ignore[misc]
            calls=20,
        )
    model = Gpt(layers=2 if small else 12, d=128 if small else 768).to(device)
    for tokens in (1, 16, 128):
        yield _inference(device, f"GPT-2 small, inference, {tokens} tokens", model, tokens)
    del model
    yield _training(device, "GPT of 4 layers, d=256, batch 8 x 128, training step", Gpt(4, 256).to(device))


def _inference(device: str, name: str, model: nn.Module, tokens: int) -> Ratio:
    prompt = torch.randint(50257, (1, tokens), device=device)

    def call(autocast: type[torch.autocast]) -> None:
        with torch.no_grad(), autocast(device, dtype=torch.bfloat16):
            model(prompt)

    return _scoped(device, name, model, call, calls=50)


def _training(device: str, name: str, model: nn.Module) -> Ratio:
    tokens = torch.randint(50257, (8, 128), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(autocast: type[torch.autocast]) -> None:
        with autocast(device, dtype=torch.bfloat16):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return _scoped(device, name, model, step, calls=20)


def _scoped(
    device: str, name: str, model: nn.Module, call: Callable[[type[torch.autocast]], None], *, calls: int
) -> Ratio:
    return compare_on(
        device,
        f"{name}, {calls} times, the first of which casts",
        lambda: call(torch.autocast),
        lambda: call(amp_core.autocast),
        calls=calls,
        rounds=7,
        scope=lambda: amp_core.cached_casts(model),
    )
