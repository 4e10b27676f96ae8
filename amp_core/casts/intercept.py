"""Puts the weight caches in front of the ops that autocast runs in the lower precision.

While a cache is acquired, each such op of its device types has a Python kernel on the Autocast key
that takes a weight's cast from the cache. It costs a few microseconds per call of these ops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from amp_core._torch import internals as _torch
from amp_core.casts.cache import CASTS, WeightCache
from amp_core.dispatch.engine import engine

OPS = (
    "addbmm",
    "addmm",
    "baddbmm",
    "bmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "linear",
    "matmul",
    "mm",
    "prelu",
)
"""The ops that take weights, of those that every device runs in the lower precision."""

_FULL_NAMES = tuple(f"aten::{op if '.' in op else op + '.default'}" for op in OPS)

_lock = threading.Lock()
_caches: tuple[WeightCache, ...] = ()
_debugging = False
_held: dict[str, tuple[int, Callable[[], None]]] = {}


def acquire(cache: WeightCache, device_types: Iterable[str]) -> Callable[[], None]:
    """Consult `cache` from now on; return what ends that."""
    types = sorted(device_types)
    with _lock:
        for device_type in types:
            count, restore = _held.get(device_type, (0, None))
            if restore is None:
                restore = _torch.intercept_autocast(device_type, OPS, _kernel(device_type))
            _held[device_type] = (count + 1, restore)
        _set_caches((*_caches, cache))

    def release() -> None:
        with _lock:
            _set_caches(tuple(c for c in _caches if c is not cache))
            for device_type in types:
                count, restore = _held.pop(device_type)
                if count > 1:
                    _held[device_type] = (count - 1, restore)
                else:
                    restore()

    return release


def _set_caches(caches: tuple[WeightCache, ...]) -> None:
    global _caches, _debugging  # noqa: PLW0603  # replaced whole, so that ops read them without a lock
    _caches = caches
    _debugging = any(cache.debug for cache in caches)


def held_ops(device_type: str) -> frozenset[str]:
    """Return the full names of the ops that have a kernel of this module now. They report to observers."""
    with _lock:
        return frozenset(_FULL_NAMES if device_type in _held else ())


def _kernel(device_type: str) -> Callable[[str, Any, Any], Callable[..., Any]]:
    local = engine(device_type).local  # asked for its observer at each op

    def kernel_of(name: str, op: Any, guard: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype = torch.get_autocast_dtype(device_type)
            entries = CASTS[dtype]
            low = []
            for arg in args:
                entry = entries.get(id(arg))
                if entry is not None and entry.is_fresh(arg) and not _debugging:
                    low.append(entry.cast)
                elif isinstance(arg, Tensor) and arg.dtype is not dtype:
                    low.append(_cast(arg, dtype, device_type))
                else:
                    low.append(arg)
            with guard():
                return op(*low, **kwargs)

        def observed(*args: Any, **kwargs: Any) -> Any:
            if local.observer is None:
                return kernel(*args, **kwargs)
            return local.observer(name, lambda: kernel(*args, **kwargs), args, kwargs)

        return observed

    return kernel_of


def _cast(tensor: Tensor, dtype: torch.dtype, device_type: str) -> Tensor:
    if not tensor.is_floating_point() or tensor.dtype is torch.float64 or tensor.device.type != device_type:
        return tensor
    for cache in _caches:
        cast = cache.lookup(tensor, dtype)
        if cast is not None:
            return cast
    return tensor.to(dtype)
