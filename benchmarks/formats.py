"""Quantising a float32 tensor, with scale and counts, against two reads and one write of its memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from amp_core.formats import E2M1, E4M3, Quantization, quantize
from benchmarks.ab import Ratio, compare


def run() -> Iterator[Ratio]:
    """Compare with a sum and a copy of the same tensor, and with torchao's cast, which counts nothing."""
    x = torch.randn(4096, 2048)
    size = f"{x.nbytes / 1e6:.0f} MB"

    def passes() -> None:
        """Read twice and write once."""
        x.sum()
        target.copy_(x)

    target = torch.empty_like(x)
    for name, quantization in {
        "e4m3 per tensor": Quantization(E4M3),
        "e4m3 per 32, e8m0": Quantization(E4M3, 32, "e8m0"),
        "e2m1 per 16, e4m3": Quantization(E2M1, 16, "e4m3"),
    }.items():
        ours = _packed(x, quantization)
        yield compare(f"{name}, {size}: two reads and a write", passes, ours, rounds=7)
        if quantization.scale == "float32":  # torch 2.13 compiles no cast to e8m0 for the CPU
            compiled = torch.compile(ours, fullgraph=True)
            yield compare(f"{name}, {size}: the same, ours compiled", passes, compiled, rounds=7)
    if importlib.util.find_spec("torchao"):
        theirs, ours = _torchao(x), _packed(x, Quantization(E4M3))
        yield compare(f"e4m3 per tensor, {size}: torchao", theirs, ours, rounds=7)
        sides = [torch.compile(side, fullgraph=True) for side in (theirs, ours)]
        yield compare(f"e4m3 per tensor, {size}: torchao, both compiled", *sides, rounds=7)


def _packed(x: Tensor, quantization: Quantization) -> Callable[[], tuple[Tensor, ...]]:
    def ours() -> tuple[Tensor, ...]:
        quantized = quantize(x, quantization).packed()
        return quantized.values, quantized.scale, quantized.counts

    return ours


def _torchao(x: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    def theirs() -> tuple[Tensor, ...]:
        encode = tensor_to_scale(x, torch.float8_e4m3fn)
        return to_fp8_saturated(x * encode, torch.float8_e4m3fn), 1 / encode

    return theirs
