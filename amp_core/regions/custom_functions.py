"""`custom_fwd` and `custom_bwd`: autocast for the two halves of a ``torch.autograd.Function``."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar, overload

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from typing_extensions import ParamSpec

from amp_core._torch.dynamo import when_loaded
from amp_core._torch.tracing import is_compiling
from amp_core.common.arguments import check_dtype, device_type_of
from amp_core.common.containers import map_tensors
from amp_core.common.locks import new_lock
from amp_core.common.text import counted
from amp_core.dispatch.activate import default_policy
from amp_core.dispatch.engine import engine
from amp_core.dispatch.functions import subclasses, when_defined
from amp_core.plugin.default_manager import get_backend
from amp_core.plugin.results import wrong_kernel
from amp_core.policy import OpPolicy
from amp_core.regions.region import autocast

P = ParamSpec("P")
R = TypeVar("R")
Device = str | torch.device | Tensor


class _ForwardState(NamedTuple):
    """The autocast state of `forward`, which `backward` restores."""

    autocast: bool
    dtype: torch.dtype
    policy: OpPolicy | None = None


def _check_callable(function: object, decorator: str) -> None:
    if not callable(function):
        raise TypeError(f"{decorator}() decorates a function, not {function!r}.")


class _Decorator(Protocol):
    """Keeps the signature of what it decorates."""

    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def custom_fwd(
    fwd: Callable[P, R], *, device_type: Device, cast_inputs: torch.dtype | None = None
) -> Callable[P, R]: ...
@overload
def custom_fwd(
    fwd: None = None, *, device_type: Device, cast_inputs: torch.dtype | None = None
) -> _Decorator: ...
def custom_fwd(
    fwd: Callable[P, R] | None = None, *, device_type: Device, cast_inputs: torch.dtype | None = None
) -> Callable[P, R] | _Decorator:
    """Decorate the ``forward`` of a custom autograd function.

    Works with ``forward(ctx, ...)``, and with ``forward(...)`` plus ``setup_context``, which gets the inputs
    as they were given, not cast.

    Args:
        fwd: the function to decorate; if omitted, a decorator is returned.
        device_type: the device type whose autocast state applies.
        cast_inputs: inside an autocast region, cast the floating-point tensor arguments on `device_type`
            (except float64) to this dtype in one kernel call, and run `fwd` with autocast off. With ``None``,
            and outside regions, `fwd` runs unchanged.

    Returns:
        The decorated function, or a decorator if `fwd` is omitted.

    Raises:
        ValueError: `device_type` is no string, device or tensor.
        TypeError: `fwd` is not callable, or `cast_inputs` no dtype.

    Example:
        >>> import torch, amp_core
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     @amp_core.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...     @staticmethod
        ...     @amp_core.custom_bwd(device_type="cpu")
        ...     def backward(ctx, grad):
        ...         (x,) = ctx.saved_tensors
        ...         return 2 * x * grad
        >>> with amp_core.autocast("cpu"):
        ...     Square.apply(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    device_type = device_type_of(device_type)
    if cast_inputs is not None:
        check_dtype(cast_inputs, "cast_inputs")
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    _check_callable(fwd, "custom_fwd")
    function = fwd

    def state_now() -> _ForwardState:
        enabled = torch.is_autocast_enabled(device_type) and cast_inputs is None
        return _ForwardState(enabled, torch.get_autocast_dtype(device_type), _policy_in_force(device_type))

    @functools.wraps(function)
    def decorate_fwd(*args: P.args, **kwargs: P.kwargs) -> R:
        state = state_now()
        if has_ctx := bool(args) and isinstance(args[0], FunctionCtx):
            _store(args[0], state)
        elif args and _may_stand_for_ctx(args[0]):
            with contextlib.suppress(AttributeError):  # a frozen input of a function with setup_context
                _store(args[0], state)
        if cast_inputs is None or not torch.is_autocast_enabled(device_type):
            result = function(*args, **kwargs)
        else:
            with autocast(device_type, enabled=False):
                args, kwargs = _cast((args, kwargs), device_type, cast_inputs)
                result = function(*args, **kwargs)
        if not has_ctx:
            _carry_to_setup_context(decorate_fwd)
        return result

    setattr(decorate_fwd, _STATE, state_now)
    when_defined(_carry_state)  # torch may call only its `vmap`
    return decorate_fwd


@overload
def custom_bwd(bwd: Callable[P, R], *, device_type: Device) -> Callable[P, R]: ...
@overload
def custom_bwd(bwd: None = None, *, device_type: Device) -> _Decorator: ...
def custom_bwd(bwd: Callable[P, R] | None = None, *, device_type: Device) -> Callable[P, R] | _Decorator:
    """Decorate the ``backward`` of a custom autograd function to run in the autocast state of ``forward``.

    Args:
        bwd: the function to decorate; if omitted, a decorator is returned.
        device_type: the device type passed to `custom_fwd`.

    Returns:
        The decorated function, or a decorator if `bwd` is omitted. When called, it raises a ``RuntimeError``
        if ``forward`` is not decorated with `custom_fwd`.

    Raises:
        ValueError: `device_type` is no string, device or tensor.
        TypeError: `bwd` is not callable.

    Example::

        class Double(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type="cpu")
            def forward(ctx, x):
                return 2 * x

            @staticmethod
            @custom_bwd(device_type="cpu")
            def backward(ctx, grad):
                return 2 * grad
    """
    device_type = device_type_of(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)
    _check_callable(bwd, "custom_bwd")
    global _decorated_backwards  # noqa: PLW0603
    _decorated_backwards += 1
    function = bwd

    @functools.wraps(function)
    def decorate_bwd(*args: P.args, **kwargs: P.kwargs) -> R:
        state = _forward_state(args[0])
        policy = state.policy
        if policy is None and _policy_in_force(device_type) is not None:
            policy = default_policy(get_backend(device_type))
        with autocast(device_type, dtype=state.dtype, enabled=state.autocast, policy=policy):
            return function(*args, **kwargs)

    return decorate_bwd


def _policy_in_force(device_type: str) -> OpPolicy | None:
    """Return the policy of the region around this call, if any. Dynamo cannot keep one on `ctx`."""
    return None if is_compiling() else engine(device_type).policy


def _may_stand_for_ctx(first: object) -> bool:
    """Whether a program that calls ``forward`` by hand may pass `first` to ``backward`` as its ``ctx``."""
    return not isinstance(first, Tensor) and hasattr(first, "__dict__") and not callable(first)


def _store(ctx: Any, state: _ForwardState) -> None:
    # Other libraries read the first two, which are torch's.
    ctx._fwd_used_autocast, ctx._dtype, ctx._amp_core_policy = state


def _forward_state(ctx: Any) -> _ForwardState:
    try:
        return _ForwardState(ctx._fwd_used_autocast, ctx._dtype, getattr(ctx, "_amp_core_policy", None))
    except AttributeError:
        name = type(ctx).__name__.removesuffix("Backward")
        raise RuntimeError(
            f"custom_bwd on {name}.backward does not know the autocast state of {name}.forward: decorate "
            f"{name}.forward with custom_fwd and the same device_type."
        ) from None


_wrapping = new_lock()
_decorated_backwards = 0


def _carry_to_setup_context(decorated: Callable[..., Any]) -> None:
    """Have the matching ``setup_context``, which torch calls next in this thread, store the state."""
    if torch.compiler.is_dynamo_compiling():
        if _WRAPPED in decorated.__dict__ or not _is_forward(decorated):
            return
    elif _is_wrapped(decorated):
        return
    with _wrapping:
        classes = list(_functions_with(decorated))
        for cls in classes:
            _carry_state(cls)
        # Last: other threads go on when they see it.
        known = list(map(weakref.ref, classes))
        decorated.__dict__[_WRAPPED] = known, _defined(known)


_WRAPPED, _STORES, _STATE = "_amp_core_wrapped", "_amp_core_stores", "_amp_core_state"


def _carry_state(cls: Any) -> None:
    """Have ``setup_context`` store the state if ``forward`` is decorated."""
    state_now = getattr(cls.forward, _STATE, None)
    known = getattr(cls.setup_context, _STORES, None)
    if state_now is None or known == (cls.setup_context, state_now):
        return
    if cls.setup_context is not torch.autograd.Function.setup_context:
        cls.setup_context = staticmethod(_storing(cls.setup_context, state_now))


def _is_wrapped(decorated: Callable[..., Any]) -> bool:
    """Whether all autograd functions with this ``forward`` store the state."""
    wrapped = decorated.__dict__.get(_WRAPPED)
    return wrapped is not None and wrapped[1] == _defined(wrapped[0])


def _defined(known: Iterable[Callable[[], Any]]) -> list[int]:
    """Return what changes when another class may have got the ``forward`` of those known."""
    return [_decorated_backwards, *[len(cls.__subclasses__()) for ref in known if (cls := ref()) is not None]]


def _is_forward(decorated: Callable[..., Any]) -> bool:
    """Whether an autograd function has `decorated`. Dynamo calls this while it traces: it knows no locks."""
    return any(_functions_with(decorated))


when_loaded(lambda: torch.compiler.assume_constant_result(_is_forward))  # type: ignore[no-untyped-call]


def _functions_with(decorated: Callable[..., Any]) -> Iterator[Any]:
    """Yield the autograd functions that have or inherit `decorated`, each after those it inherits from.

    Their ``forward`` may be a wrapper of it, as by a rule for the function.
    """
    for cls in subclasses(torch.autograd.Function):
        forward = getattr(cls, "forward", None)
        while forward is not decorated and forward is not None:
            forward = getattr(forward, "__wrapped__", None)
        if forward is not None:
            yield cls


def _storing(setup_context: Callable[..., Any], state_now: Callable[[], _ForwardState]) -> Callable[..., Any]:
    @functools.wraps(setup_context)
    def stores(ctx: Any, inputs: Any, output: Any) -> Any:
        result = setup_context(ctx, inputs, output)  # first: it may store the state for an inherited forward
        _store(ctx, state_now())
        return result

    setattr(stores, _STORES, (stores, state_now))  # a function that wraps this one gets the attribute, too
    return stores


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Cast the eligible tensors in `value` to `dtype`: floating-point, on `device_type`, not float64.

    Containers keep their types at any depth. One kernel call casts all tensors if no gradient has to flow
    through the cast, as in the ``forward`` of an autograd function.
    """
    tensors: dict[int, Tensor] = {}

    def collect(tensor: Tensor) -> Tensor:
        if _eligible(tensor, device_type, dtype):
            tensors[id(tensor)] = tensor
        return tensor

    value = map_tensors(value, collect)
    casts = dict(zip(tensors, _cast_all(list(tensors.values()), device_type, dtype), strict=True))
    return map_tensors(value, lambda tensor: casts.get(id(tensor), tensor))


def _eligible(tensor: Tensor, device_type: str, dtype: torch.dtype) -> bool:
    return (
        tensor.is_floating_point()
        and tensor.device.type == device_type
        and tensor.dtype is not torch.float64
        and tensor.dtype is not dtype
    )


def _cast_all(tensors: list[Tensor], device_type: str, dtype: torch.dtype) -> list[Tensor]:
    flows = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    # Dynamo cannot trace how kernels are loaded.
    one_call = len(tensors) > 1 and not (flows or is_compiling())
    if one_call and all(type(t) is Tensor and t.layout is torch.strided for t in tensors):
        kernels = get_backend(device_type).kernels()
        casts = kernels.cast(tensors, dtype)
        if casts is None or len(casts) != len(tensors):
            raise wrong_kernel(kernels, "cast", device_type, casts, counted(len(tensors), "tensor"))
        return casts
    return [t.to(dtype) for t in tensors]
