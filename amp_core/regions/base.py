"""The base class of `autocast`: what a region does when it is built, and how it is pickled and called."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from typing_extensions import ParamSpec

from amp_core._torch import cast_cache
from amp_core._torch.context_manager import ContextManager
from amp_core._torch.dynamo import trace_as_context_manager, trace_as_own_class, when_loaded
from amp_core._torch.tracing import outside_graphs
from amp_core.common.arguments import device_type_of
from amp_core.common.optimizers import after_every_step, parameters_of
from amp_core.dispatch.activate import Activation, activation, check_policy, default_policy, with_recipe
from amp_core.plugin.default_manager import get_backend
from amp_core.policy import OpPolicy
from amp_core.regions.decorator import autocast_decorator
from amp_core.states.region_stack import thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_core.plugin.interface import Backend

P = ParamSpec("P")
R = TypeVar("R")


class Region(torch.autocast):
    """The behaviour of `autocast`; separate because TorchScript compiles every method of that class."""

    __jit_unused_properties__: ClassVar[list[str]] = ["_cache_enabled"]  # TorchScript skips it

    _traced_as: ClassVar[ContextManager | None] = None
    _warning_stacklevel: ClassVar[int] = 3
    """Stack level of the caller's line; a subclass that calls ``super().__init__`` adds one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        how = cls._traced_as
        if how is None:
            return
        traced = next(base for base in cls.__mro__ if "_traced_as" in vars(base))
        methods = [(getattr(cls, name), getattr(traced, name)) for name in ("__enter__", "__exit__")]
        overrides = [own for own, inherited in methods if own is not inherited]
        if overrides:  # Dynamo would ignore them
            when_loaded(lambda: trace_as_own_class(cls, overrides))
        else:
            when_loaded(lambda: trace_as_context_manager([cls], how))

    def configure(
        self,
        device: str | torch.device | torch.Tensor,
        dtype: torch.dtype | None,
        enabled: bool,
        cache_enabled: bool | None,
        policy: OpPolicy | None,
    ) -> None:
        """Validate the arguments and set the attributes that entering uses; the body of ``__init__``."""
        self.device = device_type = device_type_of(device)
        backend = get_backend(device_type)
        if enabled and dtype is torch.float8_e4m3fn:
            dtype, policy = format_dtype(backend), _fp8_policy(backend, policy)
        self._policy = policy
        if dtype is None:
            is_torchs = backend._default_is_torchs
            dtype = torch.get_autocast_dtype(device_type) if is_torchs else _dtype_unnamed(backend)
        self.fast_dtype = dtype
        self._activation = None
        if enabled:
            self._activation, refusal = _resolve(backend, dtype, policy)
            if refusal is not None:
                warnings.warn(refusal, stacklevel=self._warning_stacklevel)
                enabled = False
        self._enabled = enabled
        self._keeps_casts = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
        self._settings = device_type, enabled, dtype, self._keeps_casts

    @property
    def _cache_enabled(self) -> bool:  # type: ignore[override]  # in torch, an attribute that only torch sets
        return self._keeps_casts

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_activation": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_settings" not in state:  # of an instance of torch's class, pickled before amp_compat.install()
            names = ("device", "fast_dtype", "_enabled", "_cache_enabled")
            device, dtype, enabled, keeps = (state[name] for name in names)
            self.configure(device, dtype, enabled, keeps, None)
            self.__dict__.update({name: value for name, value in state.items() if name not in names})
            return
        self.__dict__.update(state)
        if self._enabled:  # an activation belongs to one process
            self._activation = activation(get_backend(self.device), self._policy)

    def __call__(self, func: Callable[P, R]) -> Callable[P, R]:
        """Return `func` with its body run inside this region; see `autocast_decorator`."""
        if not callable(func):
            raise TypeError(
                f"autocast()(func) requires a callable, but got {type(func).__name__}. "
                f"Did you mean to use autocast as a context manager? For example:\n"
                f"    with torch.autocast(device_type=...):\n"
                f"        output = model(input)"
            )
        return autocast_decorator(self, func)

    def __repr__(self) -> str:
        return (
            f"{type(self).__qualname__}({self.device!r}, dtype={self.fast_dtype}, enabled={self._enabled}, "
            f"cache_enabled={self._keeps_casts})"
        )


def _dtype_unnamed(backend: Backend) -> torch.dtype:
    """Return the dtype of a region that names none: that of the region around it, else the device's default.

    Many plugins have a default of their own, which is not torch's setting; a region changes the setting.
    """
    device_type = backend.device_type
    if _is_on(device_type) or any(frame.region.device == device_type for frame in thread.regions):
        return torch.get_autocast_dtype(device_type)
    return backend.default_dtype()


def _is_on(device_type: str) -> bool:
    try:
        return torch.is_autocast_enabled(device_type)
    except RuntimeError:  # a device type that torch does not know, as where its package is not imported
        return False


def format_dtype(backend: Backend) -> torch.dtype:
    """Return the dtype of regions for formats: bfloat16, or the default of a device that lacks it."""
    return torch.bfloat16 if torch.bfloat16 in backend.supported_dtypes() else backend.default_dtype()


def _fp8_policy(backend: Backend, policy: OpPolicy | None) -> OpPolicy:
    """Return the policy of a region with the dtype float8_e4m3fn; other ops run in `format_dtype`."""
    under = default_policy(backend) if policy is None else policy
    check_policy(under)
    return with_recipe(under, backend.recommended_recipe(), "dtype=torch.float8_e4m3fn")


_Resolved = tuple["Activation | None", "str | None"]

# Results for enabled regions without a policy, so that each is checked once and AMP_POLICY is read once.
_resolved: dict[tuple[Backend, torch.dtype], _Resolved] = {}


def _resolve(backend: Backend, dtype: torch.dtype, policy: OpPolicy | None) -> _Resolved:
    """Return the policy that an enabled region pushes, and the warning if it must be disabled instead."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype= of a region must be a torch.dtype, not {dtype!r}.")
    known = _resolved.get((backend, dtype))
    if policy is None and known is not None:
        return known
    if known is None:
        after_every_step(_clear_casts)
        refusal = backend.autocast_refusal(dtype)
        if refusal is not None and refusal.error:
            raise RuntimeError(refusal.message)
        if refusal is not None:
            return None, refusal.message
    resolved = activation(backend, policy), None
    if policy is None:
        _resolved[backend, dtype] = resolved
    return resolved


def _clear_casts(optimizer: torch.optim.Optimizer) -> None:
    """Clear torch's cast cache, which is empty outside of regions: torch does not notice changed weights."""
    if not torch.compiler.is_dynamo_compiling():
        cast_cache.clear_within_region()
    elif any(torch.is_autocast_enabled(p.device.type) for p in parameters_of(optimizer)[:1]):
        _clear_outside_graphs()


@outside_graphs
def _clear_outside_graphs() -> None:
    cast_cache.clear_within_region()
