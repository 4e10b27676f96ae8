"""Quantising a float32 tensor, with scale and counts, against two reads and one write of its memory.

The write is as wide as the result: float32 values, or codes of one byte.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import amp_core
from amp_core.formats import E2M1, E4M3, Quantization, quantize
from benchmarks.ab import Ratio, compare


def run() -> Iterator[Ratio]:
    """Compare with a sum and a copy of the same tensor, and with torchao's cast, which counts nothing."""
    x = torch.randn(4096, 2048)
    size = f"{x.nbytes / 1e6:.0f} MB"

    kernels = amp_core.get_backend("cpu").kernels()
    for name, quantization in {
        "e4m3 per tensor": Quantization(E4M3),
        "e4m3 per 32, e8m0": Quantization(E4M3, 32, "e8m0"),
        "e2m1 per 16, e4m3": Quantization(E2M1, 16, "e4m3"),
    }.items():
        for packed in (False, True):
            passes = _passes(x, torch.float32 if not packed else torch.uint8)
            ours = partial(kernels.quantize, x, quantization, packed=packed)
            stored = "in storage" if packed else "as float32"
            yield compare(f"{name}, {size}, {stored}: two reads and a write", passes, ours, rounds=15)
        portable = _packed(x, quantization)
        yield compare(f"{name}, {size}, in storage: the portable form", portable, ours, rounds=5)
    if importlib.util.find_spec("torchao"):
        theirs, portable = _torchao(x), _packed(x, Quantization(E4M3))
        ours = partial(kernels.quantize, x, Quantization(E4M3), packed=True)
        yield compare(f"e4m3 per tensor, {size}: torchao", theirs, ours, rounds=7)
        if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
            return  # code of torch 2.13's inductor does not compile without wider vectors
        compiled = torch.compile(theirs, fullgraph=True)
        yield compare(f"e4m3 per tensor, {size}: torchao, compiled", compiled, ours, rounds=7)
        sides = compiled, torch.compile(portable, fullgraph=True)
        yield compare(f"e4m3 per tensor, {size}: torchao, both compiled", *sides, rounds=7)


def _passes(x: Tensor, written: torch.dtype) -> Callable[[], object]:
    """Read twice and write a new tensor: each the fastest pass that torch makes over so many bytes."""

    def passes() -> None:
        x.sum()
        if written is x.dtype:
            x.clone()
        else:
            x.max()
            torch.empty(x.shape, dtype=written).zero_()

    return passes


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
