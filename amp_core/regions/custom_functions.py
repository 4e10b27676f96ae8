"""`custom_fwd` and `custom_bwd`: autocast for the two halves of a ``torch.autograd.Function``."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from amp_core.common.containers import map_tensors
from amp_core.common.device_types import device_type_of
from amp_core.plugin.default_manager import get_backend
from amp_core.regions.region import autocast

Fn = Callable[..., Any]


class _Used(NamedTuple):
    """What `forward` ran under, for `backward` to run under again."""

    autocast: bool
    dtype: torch.dtype


@overload
def custom_fwd(fwd: Fn, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Fn: ...
@overload
def custom_fwd(
    fwd: None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Callable[[Fn], Fn]: ...
def custom_fwd(
    fwd: Fn | None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Fn | Callable[[Fn], Fn]:
    """Decorate the ``forward`` of a custom autograd function.

    Works with ``forward(ctx, ...)`` and with ``forward(...)`` beside ``setup_context``.

    Args:
        fwd: the function; without it, a decorator is returned.
        device_type: the device type whose autocast state counts.
        cast_inputs: in an autocast region, cast floating-point tensors of `device_type` (float64 aside)
            among the arguments to this dtype, in one call, and run `fwd` with autocast off. With ``None``,
            and outside regions, `fwd` runs as it is.

    Raises:
        ValueError: `device_type` is no device type.
    """
    device_type = device_type_of(device_type)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    function = fwd

    @functools.wraps(function)
    def decorate_fwd(*args: Any, **kwargs: Any) -> Any:
        enabled = torch.is_autocast_enabled(device_type)
        used = _Used(enabled and cast_inputs is None, torch.get_autocast_dtype(device_type))
        if has_ctx := bool(args) and isinstance(args[0], FunctionCtx):
            # torch's names, which other libraries read.
            args[0]._fwd_used_autocast, args[0]._dtype = used  # type: ignore[attr-defined]
        if cast_inputs is None or not enabled:
            result = function(*args, **kwargs)
        else:
            with autocast(device_type, enabled=False):
                args, kwargs = _cast((args, kwargs), device_type, cast_inputs)
                result = function(*args, **kwargs)
        if not has_ctx:
            _hand_to_setup_context(decorate_fwd, used)
        return result

    return decorate_fwd


@overload
def custom_bwd(bwd: Fn, *, device_type: str) -> Fn: ...
@overload
def custom_bwd(bwd: None = None, *, device_type: str) -> Callable[[Fn], Fn]: ...
def custom_bwd(bwd: Fn | None = None, *, device_type: str) -> Fn | Callable[[Fn], Fn]:
    """Decorate the ``backward`` of a custom autograd function: it runs in the autocast state of `forward`.

    Args:
        bwd: the function; without it, a decorator is returned.
        device_type: the device type, the same as given to `custom_fwd`.

    Raises:
        ValueError: `device_type` is no device type.
        RuntimeError: (at the backward) ``forward`` is not decorated with `custom_fwd`.
    """
    device_type = device_type_of(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)
    function = bwd

    @functools.wraps(function)
    def decorate_bwd(*args: Any, **kwargs: Any) -> Any:
        used = _recall(args[0])
        with autocast(device_type, dtype=used.dtype, enabled=used.autocast):
            return function(*args, **kwargs)

    return decorate_bwd


def _recall(ctx: Any) -> _Used:
    try:
        return _Used(ctx._fwd_used_autocast, ctx._dtype)
    except AttributeError:
        name = type(ctx).__name__.removesuffix("Backward")
        raise RuntimeError(
            f"custom_bwd on {name}.backward does not know what {name}.forward ran under: decorate "
            f"{name}.forward with custom_fwd of the same device_type."
        ) from None


class _Handed(threading.local):
    used: _Used


_handed = _Handed()


def _hand_to_setup_context(decorated: Fn, used: _Used) -> None:
    """Let the ``setup_context`` beside `decorated`, which torch calls next in this thread, store `used`."""
    _handed.used = used
    if "_amp_core_wraps_setup" in decorated.__dict__:
        return
    decorated.__dict__["_amp_core_wraps_setup"] = True
    for cls in _subclasses(torch.autograd.Function):
        if getattr(cls.__dict__.get("forward"), "__func__", None) is decorated:
            cls.setup_context = staticmethod(_storing(cls.setup_context))


def _storing(setup_context: Fn) -> Fn:
    @functools.wraps(setup_context)
    def stores(ctx: Any, inputs: Any, output: Any) -> Any:
        ctx._fwd_used_autocast, ctx._dtype = _handed.used
        return setup_context(ctx, inputs, output)

    return stores


def _subclasses(cls: Any) -> Iterator[Any]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Cast the eligible tensors in `value` to `dtype`: floating point, on `device_type`, not float64.

    Containers of any nesting keep their types; the tensors in them are cast by one kernel call where no
    gradient is to flow through the cast, as in the ``forward`` of an autograd function.
    """
    found: dict[int, Tensor] = {}

    def collect(tensor: Tensor) -> Tensor:
        if _eligible(tensor, device_type, dtype):
            found[id(tensor)] = tensor
        return tensor

    value = map_tensors(value, collect)
    casts = dict(zip(found, _cast_all(list(found.values()), device_type, dtype), strict=True))
    return map_tensors(value, lambda tensor: casts.get(id(tensor), tensor))


def _eligible(tensor: Tensor, device_type: str, dtype: torch.dtype) -> bool:
    return (
        tensor.is_floating_point()
        and tensor.device.type == device_type
        and tensor.dtype is not torch.float64
        and tensor.dtype is not dtype
    )


def _cast_all(tensors: list[Tensor], device_type: str, dtype: torch.dtype) -> list[Tensor]:
    one_call = len(tensors) > 1 and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    if one_call and all(type(t) is Tensor and t.layout is torch.strided for t in tensors):
        return get_backend(device_type).kernels().cast(tensors, dtype)
    return [t.to(dtype) for t in tensors]
