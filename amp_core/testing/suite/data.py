"""Inputs and comparisons that the checks share."""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from amp_core._torch.autocast import torch_autocast
from amp_core._torch.dispatcher import short_name
from amp_core._torch.tracing import TorchDispatchMode
from amp_core.formats import Quantized, Recipe, quantize
from amp_core.kernels import GradStats, Kernels
from amp_core.plugin import Backend

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plain(tensor: Tensor) -> Tensor:
    """Return the values on the CPU, as they would print, perhaps in the tensor's own memory."""
    here = tensor.detach().cpu()
    if here.is_complex():
        here = here.resolve_conj()
    return here.resolve_neg() if here.is_neg() else here


def _integers(here: Tensor) -> Tensor:
    """Return the bits of plain values as integers."""
    real = torch.view_as_real(here) if here.is_complex() else here
    return real.view(_INTEGER[real.itemsize])


def bits(tensor: Tensor) -> Tensor:
    """Return the bits of `tensor` as integers on the CPU, flat, perhaps in its own memory."""
    return _integers(plain(tensor)).reshape(-1)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether both hold the same bits."""
    return torch.equal(_integers(plain(one)), _integers(plain(other)))


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether plain values have one dtype and shape and the same bits; any NaN equals any other."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(_integers(one), _integers(other)) or not bool(differing(one, other).any())


def differing(one: Tensor, other: Tensor) -> Tensor:
    """Return which elements of two tensors of one dtype and shape differ in their bits, flat.

    Any NaN equals any other.
    """
    different = (bits(one) != bits(other)) & ~(_nans(one) & _nans(other))
    return different.view(-1, 2).any(1) if one.is_complex() else different


def _nans(tensor: Tensor) -> Tensor:
    here = plain(tensor)
    real = torch.view_as_real(here) if here.is_complex() else here
    return (real if real.dtype is torch.float64 else real.float()).isnan().reshape(-1)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return values on the CPU that are normal in both senses: devices may flush subnormal ones."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex64 if dtype.is_complex else torch.float64
    values = torch.randn(shape, dtype=wide, generator=generator).to(dtype)
    if dtype is torch.float16:  # others have more exponents
        values[values.abs() < torch.finfo(dtype).tiny] = 1.0
    return values


def scalar(
    value: float, device: torch.device, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return one element on `device`, in the middle of others, as callers pack their numbers."""
    return torch.tensor([7, value, 7], dtype=dtype).to(device)[1:2].reshape(shape)


def statistics(stats: GradStats) -> Iterator[Tensor]:
    """Yield the four tensors, without those that a subclass adds."""
    for field in fields(GradStats):
        yield getattr(stats, field.name)


def parts(operand: Quantized | Tensor) -> list[Tensor]:
    """Return the tensors of an operand of a product."""
    if isinstance(operand, Tensor):
        return [operand]
    outer = operand.tensor_scale
    return [operand.values, operand.scale, *([] if outer is None else [outer])]


def there(quantized: Quantized, device: torch.device) -> Quantized:
    """Return `quantized`, which is on the host, on `device`."""
    values, scale, *outer = (part.to(device, copy=True) for part in parts(quantized))
    return replace(quantized, values=values, scale=scale, tensor_scale=outer[0] if outer else None)


@functools.cache
def rows_of_fp8() -> tuple[Quantized, Quantized]:
    """Return the operands of a product, on the host."""
    left, right = Recipe.fp8_rowwise().operands("output")
    assert left is not None
    assert right is not None
    ones = torch.ones(32, 32, dtype=torch.float32, device="cpu")
    return quantize(ones, left, -1), quantize(ones, right, -2)


def wording(text: str) -> str:
    """Return a reason without its numbers, which may change from call to call."""
    return re.sub(r"\d+", "0", text)


ASKED = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64,
    torch.int32,
)  # fmt: skip
"""Dtypes that users name: some are supported, others are admitted or refused in words."""


def queries(backend: Backend) -> dict[str, Callable[[], Any]]:
    """Return a call of each hook of `backend`; one that takes a dtype is called with each of `ASKED`."""
    return {
        "availability": backend.availability,
        "default_dtype": backend.default_dtype,
        "supported_dtypes": backend.supported_dtypes,
        "dtype_reason": lambda: tuple(map(backend.dtype_reason, ASKED)),
        "autocast_refusal": lambda: tuple(map(backend.autocast_refusal, ASKED)),
        "scaler_refusal": backend.scaler_refusal,
        "op_policy": backend.op_policy,
        "recommended_recipe": backend.recommended_recipe,
        "kernels": backend.kernels,
        "the name and reason of kernels": lambda: _words_of(backend.kernels()),
        "scaled_products": backend.scaled_products,
    }


def _words_of(kernels: Kernels) -> tuple[str, str]:
    return kernels.name, kernels.reason


def torch_admits(device_type: str, dtype: torch.dtype) -> bool:
    """Whether torch's own region for the device is enabled with `dtype`, of which it says nothing."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            torch_autocast(device_type, dtype=dtype)
        except RuntimeError:
            return False
    return not said


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` torch's default in the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Ops, and waiting for the device.


class After(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Calls `see` with each op, its arguments and its result."""

    def __init__(self, see: Callable[[Any, tuple[Any, ...], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._see(func, args, result)
        return result


_WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero"}
_PYTHON_WAITS = {"__array__", "__bool__", "__float__", "__int__", "cpu", "item", "numpy", "tolist"}


class _Called(TorchFunctionMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _PYTHON_WAITS:
            self._seen.append(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


@contextmanager
def waits(device: torch.device) -> Iterator[list[str]]:
    """Collect what makes the host wait for `device`: reads of values, copies off it, synchronization.

    Where torch has a sync debug mode for the device, it is on as well: it sees kernels written in C++.
    """
    seen: list[str] = []

    def see(func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = short_name(func)
        if name in _WAITS or (name in ("_to_copy", "copy_") and leaves(args, result)):
            seen.append(str(func))

    def leaves(args: tuple[Any, ...], result: Any) -> bool:
        devices = {a.device.type for a in args if isinstance(a, Tensor)}
        return device.type in devices and result.device.type != device.type

    module = torch.get_device_module(device)
    with ExitStack() as stack:
        if hasattr(module, "set_sync_debug_mode"):
            stack.callback(module.set_sync_debug_mode, module.get_sync_debug_mode())
            module.set_sync_debug_mode("error")
        for owner in (module, torch.accelerator):
            if hasattr(owner, "synchronize"):
                stack.enter_context(_watched(owner, "synchronize", seen))
        stack.enter_context(_Called(seen))
        stack.enter_context(After(see))
        yield seen


@contextmanager
def _watched(owner: Any, name: str, seen: list[str]) -> Iterator[None]:
    """Collect the calls of a function of a module in the block."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        seen.append(f"{owner.__name__}.{name}")
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield


@contextmanager
def device_work(device: torch.device) -> Iterator[list[str]]:
    """Collect the ops that give a tensor on `device`."""
    seen: list[str] = []

    def see(func: Any, _args: tuple[Any, ...], result: Any) -> None:
        if isinstance(result, Tensor) and result.device.type == device.type:
            seen.append(str(func))

    with After(see):
        yield seen


def rounded_once(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `values` rounded to `dtype`, to nearest and ties to even.

    torch rounds float64 to a 16-bit dtype twice, through float32, and can miss the nearest number.
    """
    near = values.to(dtype)
    if values.dtype is not torch.float64 or dtype.itemsize != 2:
        return near
    bits = near.view(torch.int16)
    around = torch.stack([bits, bits - 1, bits + 1])
    # Beyond the largest number the next one would be twice the largest power of two.
    beyond = 2.0 ** (math.frexp(torch.finfo(dtype).max)[1])
    numbers = around.view(dtype).double()
    numbers = torch.where(numbers.isinf(), numbers.sign() * beyond, numbers)
    distances = (numbers - values).abs().nan_to_num(nan=math.inf)
    # Of two numbers that are equally near, the even one comes first.
    order = torch.where(distances == distances.amin(0), (around & 1) + 1, 3).argmin(0)
    nearest = around.gather(0, order.unsqueeze(0)).squeeze(0).view(dtype)
    return torch.where(values.isfinite(), nearest, near)
