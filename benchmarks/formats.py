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
    yield from _against_passes("e4m3 per tensor", Quantization(E4M3), torch.randn(16, 4096, 2048))
    x = torch.randn(4096, 2048)
    for name, quantization in {
        "e4m3 per tensor": Quantization(E4M3),
        "e4m3 per 32, e8m0": Quantization(E4M3, 32, "e8m0"),
        "e2m1 per 16, e4m3": Quantization(E2M1, 16, "e4m3"),
    }.items():
        yield from _against_passes(name, quantization, x)
        portable, ours = _packed(x, quantization), _kernel(x, quantization, packed=True)
        yield compare(f"{name}, {_size(x)}, in storage: the portable form", portable, ours, rounds=5)
    if importlib.util.find_spec("torchao"):
        yield from _against_torchao(x)


def _against_passes(name: str, quantization: Quantization, x: Tensor) -> Iterator[Ratio]:
    for stored, dtype in {"as float32": x.dtype, "in storage": torch.uint8}.items():
        ours = _kernel(x, quantization, packed=dtype is torch.uint8)
        title = f"{name}, {_size(x)}, {stored}: two reads and a write"
        yield compare(title, _passes(x, dtype), ours, rounds=15)


def _against_torchao(x: Tensor) -> Iterator[Ratio]:
    theirs, portable = _torchao(x), _packed(x, Quantization(E4M3))
    ours = _kernel(x, Quantization(E4M3), packed=True)
    name = f"e4m3 per tensor, {_size(x)}: torchao"
    yield compare(name, theirs, ours, rounds=7)
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return  # code of torch 2.13's inductor does not compile without wider vectors
    compiled = torch.compile(theirs, fullgraph=True)
    yield compare(f"{name}, compiled", compiled, ours, rounds=7)
    yield compare(f"{name}, both compiled", compiled, torch.compile(portable, fullgraph=True), rounds=7)


def _size(x: Tensor) -> str:
    return f"{x.nbytes / 1e6:.0f} MB"


def _kernel(x: Tensor, quantization: Quantization, *, packed: bool) -> Callable[[], object]:
    return partial(amp_core.get_backend("cpu").kernels().quantize, x, quantization, packed=packed)


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
