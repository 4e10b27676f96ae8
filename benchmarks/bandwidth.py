"""The kernels' passes over memory against the fastest plain pass that torch makes over as many bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import amp_core
from benchmarks.ab import Ratio, compare
from benchmarks.shapes import gpt2_small, tensors


def run() -> Iterator[Ratio]:
    """Compare the read pass with a dot product, and the pass that multiplies in place with mul_."""
    kernels = amp_core.get_backend("cpu").kernels()
    one = torch.ones(())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        grads = tensors(gpt2_small(), dtype)
        size = sum(g.numel() * g.element_size() for g in grads)
        plain = torch.randn(size // 4)  # float32: as many bytes
        short = str(dtype).removeprefix("torch.")
        yield compare(
            f"{short}, {size / 1e6:.0f} MB: read pass against torch.dot",
            lambda plain=plain: torch.dot(plain, plain),  # type: ignore[misc]
            lambda grads=grads: kernels.grad_stats(grads),  # type: ignore[misc]
        )
        yield compare(
            f"{short}, {size / 1e6:.0f} MB: multiply_ against mul_",
            lambda plain=plain: plain.mul_(one),  # type: ignore[misc]
            lambda grads=grads: kernels.multiply_(grads, one),  # type: ignore[misc]
        )
