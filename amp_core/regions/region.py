"""What a region does when it is built, entered and left. `autocast` is the class that users see."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from typing_extensions import ParamSpec, Self

from amp_core._torch import internals as _torch
from amp_core._torch.dispatcher import constant_for_dynamo
from amp_core.common.device_types import device_type_of
from amp_core.dispatch.activate import activation, default_policy, in_float32, pop, push
from amp_core.errors import PolicyError
from amp_core.plugin.default_manager import get_backend
from amp_core.regions.decorator import autocast_decorator
from amp_core.regions.torch_state import settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_core.plugin.interface import Backend
    from amp_core.policy import OpPolicy

P = ParamSpec("P")
R = TypeVar("R")


class Region(torch.autocast):
    """The behaviour of `autocast`, apart from it because TorchScript compiles every method of that class."""

    __jit_unused_properties__: ClassVar[list[str]] = ["_cache_enabled"]  # TorchScript passes it over

    _tracing: tuple[Any, ...] = ()
    _warning_stacklevel: ClassVar[int] = 3
    """Frames from the warning to the caller's line; a subclass that calls ``super().__init__`` adds one."""

    def configure(
        self,
        device: str | torch.device | torch.Tensor,
        dtype: torch.dtype | None,
        enabled: bool,
        cache_enabled: bool | None,
        policy: OpPolicy | None,
    ) -> None:
        """Check the arguments and settle what entering will do; the body of ``__init__``."""
        device_type = device_type_of(device)
        resolved = _resolve(device_type, dtype, enabled, policy)
        self.device = device_type
        self.fast_dtype, self._policy_handle, refusal = resolved
        self._policy = policy
        if refusal is not None:
            warnings.warn(refusal, stacklevel=self._warning_stacklevel)
            enabled = False
        self._enabled = enabled
        self._keeps_casts = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
        self._settings = settings_of(device_type, enabled, self.fast_dtype, self._keeps_casts)

    def enter_traced(self) -> Self:
        """Enter while Dynamo traces."""
        # torch.compile and torch.export recognise a `with torch.autocast`, nothing else.
        dtype, handle = self._traced_settings()
        traced = _traced(self.device, dtype, self._enabled, self._keeps_casts)
        traced.__enter__()
        self._tracing = (*self._tracing, traced)
        if handle is not None:
            push(handle)
        return self

    def exit_traced(self) -> bool:
        """Leave while Dynamo traces."""
        _, handle = self._traced_settings()
        if handle is not None:
            pop(handle)
        traced = self._tracing[-1]
        self._tracing = self._tracing[:-1]
        traced.__exit__(None, None, None)
        return False

    def _traced_settings(self) -> tuple[torch.dtype, int | None]:
        if self._enabled and self.fast_dtype is torch.float32:
            traced: tuple[torch.dtype, int] = _float32_traced(self.device, self._policy)
            return traced
        return self.fast_dtype, self._policy_handle

    @property
    def _cache_enabled(self) -> bool:  # type: ignore[override]  # in torch an attribute, set by torch alone
        # torch's name. Dynamo reads it to enter, as torch.autocast, an instance that it did not see built.
        _, handle = self._traced_settings()
        if handle is not None and _torch.dynamo_is_at_work():
            raise PolicyError(
                f"{self!r} has a policy and was built outside the function that torch.compile is tracing, "
                f"where its policy would be lost. Build the region inside that function."
            )
        return self._keeps_casts

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_policy_handle": None, "_settings": None, "_tracing": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._settings = settings_of(self.device, self._enabled, self.fast_dtype, self._keeps_casts)
        if self._enabled:  # the number of a policy is this process's own
            found = activation(get_backend(self.device), self._policy)
            self._policy_handle = None if found is None else found.handle

    def __call__(self, func: Callable[P, R]) -> Callable[P, R]:
        """Return `func` with its body inside this region; see `autocast_decorator`."""
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


@contextlib.contextmanager
def _traced(device: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool) -> Iterator[None]:
    with torch.autocast(device, dtype, enabled, cache_enabled):
        yield


_Resolved = tuple[torch.dtype, "int | None", "str | None"]

# Of regions that are enabled and name no policy: they are checked once, and AMP_POLICY is read once.
_resolved: dict[tuple[Backend, torch.dtype], _Resolved] = {}


@constant_for_dynamo
def _resolve(
    device_type: str, dtype: torch.dtype | None, enabled: bool, policy: OpPolicy | None
) -> _Resolved:
    """Return the dtype, the number of the policy to push, and why an enabled region is refused."""
    backend = get_backend(device_type)
    fast_dtype = backend.default_dtype() if dtype is None else dtype
    if not enabled:
        return fast_dtype, None, None
    known = _resolved.get((backend, fast_dtype))
    if policy is None and known is not None:
        return known
    if known is None:
        _watch_optimizers()
        refusal = backend.autocast_refusal(fast_dtype)
        if refusal is not None and refusal.error:
            raise RuntimeError(refusal.message)
        if refusal is not None:
            return fast_dtype, None, refusal.message
    found = activation(backend, policy)
    resolved = fast_dtype, None if found is None else found.handle, None
    if policy is None:
        _resolved[backend, fast_dtype] = resolved
    return resolved


@constant_for_dynamo
def _float32_traced(device_type: str, policy: OpPolicy | None) -> tuple[torch.dtype, int]:
    """Return what stands for a region of float32 in a graph, where torch's own region would refuse it."""
    backend = get_backend(device_type)
    found = activation(backend, in_float32(policy or default_policy(backend)))
    assert found is not None, "only a default policy has none"
    return backend.default_dtype(), found.handle


@functools.cache
def _watch_optimizers() -> None:
    """Clear torch's cast cache after every optimizer step: it does not see that weights have changed."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def after_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        torch.clear_autocast_cache()

    register_optimizer_step_post_hook(after_step)
