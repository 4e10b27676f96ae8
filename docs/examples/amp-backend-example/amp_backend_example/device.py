"""``npy``: a PrivateUse1 device made in Python. Its memory is NumPy arrays.

A tensor's storage is the memory of one NumPy array, handed to torch through DLPack under the device code
that torch reads as PrivateUse1. Ops run on the CPU, in place, on aliases of those arrays. A real device
would put its driver's allocator and kernels here; the AMP part, in `amp_backend_example.backend`, would
look the same.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "npy"
aten = torch.ops.aten


class DeviceModule:
    """What ``torch.npy`` is: the functions that torch and amp-core expect of a device module."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Seed nothing: random ops run by the CPU's generator."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def get_rng_state(_device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, _device: object = None) -> None:
        torch.set_rng_state(state)


# Memory: NumPy arrays, seen by torch as storage on the device.

_TENSOR_OF = ctypes.pythonapi.PyCapsule_GetPointer
_TENSOR_OF.restype, _TENSOR_OF.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_EXT_DEVICE = 12  # kDLExtDev, which torch reads as PrivateUse1


def _allocate(nbytes: int) -> torch.Tensor:
    """Return a flat uint8 tensor on the device; its memory is a NumPy array that lives as long."""
    array = np.empty(max(nbytes, 1), dtype=np.uint8)
    capsule = array.__dlpack__()
    header = _TENSOR_OF(capsule, b"dltensor")
    ctypes.c_int32.from_address(header + 8).value = _EXT_DEVICE
    return torch._C._from_dlpack(capsule)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the same memory."""
    if tensor.device.type != NAME:
        return tensor
    storage = tensor.untyped_storage()
    raw = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.from_numpy(np.frombuffer(raw, dtype=np.uint8))
    usable = storage.nbytes() // tensor.element_size() * tensor.element_size()
    typed = flat[:usable].view(tensor.dtype)
    return torch.as_strided(typed, tensor.size(), tensor.stride(), tensor.storage_offset())


# Ops: memory and views by kernels of their own, everything else on the aliases.


def _empty(size: Any, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    contiguous = torch.empty(size, device="meta").stride()
    return _empty_strided(size, contiguous, dtype)


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    count = 0 if 0 in size else last + 1
    flat = _view_dtype(_allocate(count * dtype.itemsize), dtype)
    return torch.as_strided(flat, size, stride)


def _view_dtype(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    usable = flat.numel() // dtype.itemsize * dtype.itemsize
    if not usable:  # one spare byte stands for an empty array
        flat, usable = _allocate(dtype.itemsize), dtype.itemsize
    return flat[:usable].view(dtype)


def _copy_from(source: torch.Tensor, target: torch.Tensor, _non_blocking: bool = False) -> torch.Tensor:
    _alias(target).copy_(_alias(source))
    return target


def _to_device(result: torch.Tensor) -> torch.Tensor:
    made = _empty_strided(result.size(), result.stride(), result.dtype)
    _alias(made).copy_(result)
    return made


def _resize(tensor: torch.Tensor, size: Any, **_: Any) -> torch.Tensor:
    if tensor.size() == torch.Size(size):
        return tensor
    made = _empty(size, tensor.dtype)
    return tensor.set_(made.untyped_storage(), 0, made.size(), made.stride())


def _run_on_aliases(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `op` on the arrays; what it wrote to comes back as the tensor that was given."""
    call = _Call(op, kwargs)
    low_args, low_kwargs = pytree.tree_map(call.lower, (_with_tensors(op, args), kwargs))
    result = op(*low_args, **low_kwargs)
    call.write_outputs()
    return pytree.tree_map(call.lift, result)


def _with_tensors(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `args` with a tensor for the number in ``x & 1``: torch takes numbers in arithmetic alone."""
    if not op._schema.name.startswith("aten::bitwise_"):
        return args
    dtype = next(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
    return tuple(torch.tensor(arg, dtype=dtype) if isinstance(arg, int) else arg for arg in args)


class _Call:
    """The tensors of one call, on the device and as aliases."""

    def __init__(self, op: Any, kwargs: dict[str, Any]) -> None:
        outputs = {a.name for a in op._schema.arguments if a.is_out}
        self._outputs = {id(kwargs[name]) for name in outputs if name in kwargs}
        self._given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._on_device = torch.device(kwargs.get("device") or NAME).type == NAME

    def lower(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor):
            return value
        # torch may resize an output, but not memory of NumPy's: it gets a copy, written back afterwards.
        low = _alias(value).clone() if id(value) in self._outputs else _alias(value)
        self._given[id(low)] = (low, value)
        return low

    def write_outputs(self) -> None:
        for low, value in self._given.values():
            if id(value) in self._outputs:
                _alias(_resize(value, low.size())).copy_(low)

    def lift(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self._given:
            return self._given[id(value)][1]
        return _to_device(value) if self._on_device else value


def _convolution(x: Any, w: Any, b: Any, *rest: Any) -> Any:
    return _run_on_aliases(aten.convolution.default, x, w, b, *rest)


def _convolution_backward(grad: Any, x: Any, w: Any, *rest: Any) -> Any:
    return _run_on_aliases(aten.convolution_backward.default, grad, x, w, [w.shape[0]], *rest)


_BY_SHAPE_ALONE = (
    "_reshape_alias",
    "as_strided",
    "set_.source_Storage_storage_offset",
    "unfold",
    "view",
    "view_as_complex",
    "view_as_real",
)


def _by_shape_alone(name: str) -> Any:
    """Return torch's CPU kernel of a view op, which looks at sizes and strides, never at the data."""
    return torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed


_libraries: list[torch.library.Library] = []


def register() -> None:
    """Make the device known to torch. Once per process; a second call does nothing."""
    if _libraries:
        return
    _setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule())
    ops = torch.library.Library("aten", "IMPL")
    for name in _BY_SHAPE_ALONE:
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU"):
            ops.impl(name, _by_shape_alone(name), "PrivateUse1", with_keyset=True)
    ops.impl("empty.memory_format", _empty, "PrivateUse1")
    ops.impl("resize_", _resize, "PrivateUse1")
    ops.impl("empty_strided", _empty_strided, "PrivateUse1")
    ops.impl("_copy_from", _copy_from, "PrivateUse1")
    ops.impl("convolution_overrideable", _convolution, "PrivateUse1")
    ops.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    everything_else = torch.library.Library("_", "IMPL")
    everything_else.fallback(_run_on_aliases, "PrivateUse1")
    _libraries.extend((ops, everything_else))
