"""The kernels' passes over memory against the fastest plain pass that torch makes over as many bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import amp_core
from benchmarks.ab import Ratio, compare
from benchmarks.shapes import gpt2_small, tensors


def run() -> Iterator[Ratio]:
    """Compare the read pass with a dot product, and the pass that multiplies in place with mul_.

    The limit is what multiplying as many numbers takes where they stay in the second-level caches: the
    arithmetic, which no memory can hide.
    """
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
        halves = [grads[0].new_ones(_CHUNK // dtype.itemsize) for _ in range(2)]  # one for each thread
        cached = [half for half in halves for _ in range(size // _CHUNK // 2)]
        yield compare(
            f"{short}, {size / 1e6:.0f} MB: multiply_ against mul_: limit",
            lambda plain=plain: plain.mul_(one),  # type: ignore[misc]
            lambda cached=cached: kernels.multiply_(cached, one),  # type: ignore[misc]
        )


_CHUNK = 2**18
"""Bytes that a thread processes at a time."""
