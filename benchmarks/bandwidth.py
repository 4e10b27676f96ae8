"""The kernels' passes over memory against the fastest plain pass that torch makes over as many bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import amp_core
from benchmarks.ab import Ratio, compare
from benchmarks.shapes import gpt2_small, many, tensors

_CHUNK = 2**18
"""Bytes that a thread processes at a time."""


def run() -> Iterator[Ratio]:
    """Compare the read pass with a dot product, and the pass that multiplies in place with mul_.

    The first gradients stay in the caches. The limit is what multiplying as many numbers takes where they
    stay in the second-level caches: the arithmetic, which no memory can hide.
    """
    yield from _passes(tensors(many(4, 750_000)), calls=10)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        grads = tensors(gpt2_small(), dtype)
        yield from _passes(grads, calls=1)
        yield _limit(grads)


def _passes(grads: list[torch.Tensor], *, calls: int) -> Iterator[Ratio]:
    kernels, one = amp_core.get_backend("cpu").kernels(), torch.ones(())
    plain = _as_large(grads)
    name, ready = _named(grads), kernels.prepare(grads)
    yield compare(
        f"{name}: read pass against torch.dot",
        lambda: torch.dot(plain, plain),
        lambda: kernels.grad_stats(ready),
        calls=calls,
    )
    yield compare(
        f"{name}: multiply_ against mul_",
        lambda: plain.mul_(one),
        lambda: kernels.multiply_(ready, one),
        calls=calls,
    )


def _limit(grads: list[torch.Tensor]) -> Ratio:
    kernels, one = amp_core.get_backend("cpu").kernels(), torch.ones(())
    plain = _as_large(grads)
    halves = [grads[0].new_ones(_CHUNK // grads[0].itemsize) for _ in range(2)]  # one for each thread
    cached = [half for half in halves for _ in range(_size(grads) // _CHUNK // 2)]
    return compare(
        f"{_named(grads)}: multiply_ against mul_: limit",
        lambda: plain.mul_(one),
        lambda: kernels.multiply_(cached, one),
    )


def _as_large(grads: list[torch.Tensor]) -> torch.Tensor:
    return torch.randn(_size(grads) // 4)  # float32: as many bytes


def _named(grads: list[torch.Tensor]) -> str:
    return f"{str(grads[0].dtype).removeprefix('torch.')}, {_size(grads) / 1e6:.0f} MB"


def _size(grads: list[torch.Tensor]) -> int:
    return sum(g.numel() * g.element_size() for g in grads)
