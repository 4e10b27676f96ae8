"""The parameter shapes that are measured."""

from __future__ import annotations

import torch


def gpt(layers: int, d: int) -> list[tuple[int, ...]]:
    """Return the shapes of a transformer such as GPT-2, of that many layers and that width."""
    block: list[tuple[int, ...]] = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,)]
    block += [(4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(50257, d), (1024, d), *(block * layers), (d,), (d,)]


def gpt2_small() -> list[tuple[int, ...]]:
    """Return the 148 shapes of GPT-2 small, 124 M elements."""
    return gpt(12, 768)


def many(count: int, elements: int = 1000) -> list[tuple[int, ...]]:
    """Return `count` small shapes."""
    return [(elements,)] * count


def tensors(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return normal random tensors, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
