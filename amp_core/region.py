"""What a region does when it is built, entered and left. `autocast` is the class that users see."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from typing_extensions import ParamSpec, Self

from amp_core import _torch
from amp_core._torch_dispatch import constant_for_dynamo
from amp_core.decorate import autocast_decorator
from amp_core.device import device_type_of
from amp_core.dispatch.activate import activation, pop, push
from amp_core.errors import PolicyError
from amp_core.plugin.manager import get_backend
from amp_core.region_stack import Frame, thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_core.plugin.interface import Backend
    from amp_core.policy import OpPolicy

P = ParamSpec("P")
R = TypeVar("R")

# Looked up once: entering and leaving a region is on everybody's hot path.
_is_enabled = torch.is_autocast_enabled
_set_enabled = torch.set_autocast_enabled
_get_dtype = torch.get_autocast_dtype
_set_dtype = torch.set_autocast_dtype
_is_cached = torch.is_autocast_cache_enabled
_set_cached = torch.set_autocast_cache_enabled
_enter_nesting = torch.autocast_increment_nesting
_leave_nesting = torch.autocast_decrement_nesting
_clear_cache = torch.clear_autocast_cache
_is_tracing = torch.compiler.is_dynamo_compiling
_modes_are_on = _torch.function_modes_are_on

# A NamedTuple's own constructor is a Python function and takes twice as long.
_new_frame = tuple.__new__

_admitted: set[tuple[Backend, torch.dtype]] = set()
# The number of the policy that a region without one gets: AMP_POLICY is read once.
_by_default: dict[tuple[Backend, torch.dtype], int | None] = {}


class Region(torch.autocast):
    """The behaviour of `autocast`, apart from it because TorchScript compiles every method of that class."""

    __jit_unused_properties__: ClassVar[list[str]] = ["_cache_enabled"]  # TorchScript passes it over

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
        self._keeps_casts = _is_cached() if cache_enabled is None else cache_enabled
        self._tracing: list[Any] = []

    def enter(self) -> Self:
        """Enter the region; the body of ``__enter__``."""
        if _is_tracing():
            return self._enter_traced()
        # First: it may refuse, and then nothing has changed.
        if self._policy_handle is not None:
            push(self._policy_handle)
        device, enabled, dtype = self.device, self._enabled, self.fast_dtype
        was_enabled, was_dtype, was_cached = _is_enabled(device), _get_dtype(device), _is_cached()
        if was_enabled is not enabled:
            _set_enabled(device, enabled)
        if was_dtype is not dtype:
            _set_dtype(device, dtype)
            _clear_cache()  # torch's cache does not know which dtype it holds
        if was_cached is not self._keeps_casts:
            _set_cached(self._keeps_casts)
        frame = _new_frame(Frame, (self, was_enabled, was_dtype, was_cached, _enter_nesting(), False))
        thread.regions.append(frame)
        if _modes_are_on():
            _torch.record_enter(device, dtype, enabled, self._keeps_casts)
        return self

    def exit(self) -> bool:
        """Leave the region; the body of ``__exit__``."""
        if _is_tracing():
            return self._exit_traced()
        regions = thread.regions
        frame = regions.pop() if regions and regions[-1][0] is self else regions.take_out(self)
        if self._policy_handle is not None:
            pop(self._policy_handle)
        depth = _leave_nesting()
        if depth >= frame.nesting:
            depth = _leave_leaked(frame.nesting)
        if not frame.superseded:
            self._restore(frame)
        if depth == 0:
            _clear_cache()
        if _modes_are_on():
            _torch.record_exit()
        return False

    def _restore(self, frame: Frame) -> None:
        # Compared with what is there, not with what entering changed: code inside may have set it.
        device = self.device
        if _is_enabled(device) is not frame.enabled:
            _set_enabled(device, frame.enabled)
        if _get_dtype(device) is not frame.dtype:
            _set_dtype(device, frame.dtype)
            _clear_cache()
        if _is_cached() is not frame.cached:
            _set_cached(frame.cached)

    def _enter_traced(self) -> Self:
        # torch.compile and torch.export recognise a `with torch.autocast`, nothing else.
        traced = _traced(self.device, self.fast_dtype, self._enabled, self._keeps_casts)
        traced.__enter__()
        self._tracing.append(traced)
        if self._policy_handle is not None:
            push(self._policy_handle)
        return self

    def _exit_traced(self) -> bool:
        if self._policy_handle is not None:
            pop(self._policy_handle)
        self._tracing.pop().__exit__(None, None, None)
        return False

    @property
    def _cache_enabled(self) -> bool:  # type: ignore[override]  # in torch an attribute, set by torch alone
        # torch's name. Dynamo reads it to enter, as torch.autocast, an instance that it did not see built.
        if self._policy_handle is not None and _torch.dynamo_is_at_work():
            raise PolicyError(
                f"{self!r} has a policy and was built outside the function that torch.compile is tracing, "
                f"where its policy would be lost. Build the region inside that function."
            )
        return self._keeps_casts

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_policy_handle": None, "_tracing": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
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


def _leave_leaked(nesting: int) -> int:
    """Bring the nesting below `nesting`: compiled code that raised has left regions without their exit."""
    depth = _leave_nesting()
    while depth >= nesting:
        depth = _leave_nesting()
    return depth


@constant_for_dynamo
def _resolve(
    device_type: str, dtype: torch.dtype | None, enabled: bool, policy: OpPolicy | None
) -> tuple[torch.dtype, int | None, str | None]:
    """Return the dtype, the number of the policy to push, and why an enabled region is refused."""
    backend = get_backend(device_type)
    fast_dtype = backend.default_dtype() if dtype is None else dtype
    if not enabled:
        return fast_dtype, None, None
    if policy is None and (backend, fast_dtype) in _by_default:
        return fast_dtype, _by_default[backend, fast_dtype], None
    if (backend, fast_dtype) not in _admitted:
        _watch_optimizers()
        refusal = backend.autocast_refusal(fast_dtype)
        if refusal is not None and refusal.error:
            raise RuntimeError(refusal.message)
        if refusal is not None:
            return fast_dtype, None, refusal.message
        _admitted.add((backend, fast_dtype))
    found = activation(backend, policy)
    handle = None if found is None else found.handle
    if policy is None:
        _by_default[backend, fast_dtype] = handle
    return fast_dtype, handle, None


@functools.cache
def _watch_optimizers() -> None:
    """Clear torch's cast cache after every optimizer step: it does not see that weights have changed."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def after_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        _clear_cache()

    register_optimizer_step_post_hook(after_step)
