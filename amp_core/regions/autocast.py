"""`autocast`: a region in which ops run in the dtype that the policy of the device gives them."""

# No `from __future__ import annotations`: TorchScript does not read annotations that are strings.

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from typing_extensions import ParamSpec

from amp_core._torch import internals as _torch
from amp_core.common.device_types import device_type_of
from amp_core.dispatch.activate import pop, push
from amp_core.errors import BackendNotFoundError
from amp_core.plugin.default_manager import get_backend
from amp_core.regions.decorator import autocast_decorator
from amp_core.regions.region import Region
from amp_core.regions.torch_state import enter, leave
from amp_core.states.region_stack import thread

P = ParamSpec("P")
R = TypeVar("R")

_is_scripting = torch.jit.is_scripting
_is_tracing = torch.compiler.is_dynamo_compiling


class autocast(Region):  # noqa: N801  # torch's name
    """A region, or decorator, in which ops run in mixed precision.

    Drop-in for ``torch.autocast``: an instance of it, with the same arguments, errors and warnings.
    Unlike torch's, one instance may be entered again while it is entered, by any number of threads, and
    the decorator keeps the region over the ``yield`` and ``await`` of generators and coroutines.

    Args:
        device_type: a device type with a backend (see ``amp backends``), a ``torch.device``, a tensor,
            or ``"auto"`` for the accelerator that is present, else the CPU.
        dtype: the dtype of low-precision ops; by default the device's
            (``torch.get_autocast_dtype(device_type)``).
        enabled: ``False`` makes a region without mixed precision.
        cache_enabled: whether casts of weights are kept until the outermost region ends; by default
            as in the surrounding region.
        policy: the `OpPolicy` in force in the region; by default the surrounding region's, or the
            device's own.

    Raises:
        BackendNotFoundError: nothing serves the device type (a ``RuntimeError``, as torch's).
        RuntimeError: a CUDA device that cannot do bfloat16 was asked to.
        ValueError: `device_type` is none of the above.

    Warns:
        UserWarning: the device or dtype cannot be used; the region is disabled.
    """

    # torch.jit.script knows the region by this name, and compiles the methods below: `Optional`, `Any`,
    # no keyword-only arguments.
    _jit_override_qualname = "__torch__.torch.amp.autocast_mode.autocast"

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        policy: Any = None,
    ) -> None:
        if _is_scripting():
            self._enabled = enabled
            self.device = device_type
            self.fast_dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
            return
        self.configure(device_type, dtype, enabled, cache_enabled, policy)

    def __enter__(self) -> Any:
        if _is_scripting():
            return self
        if _is_tracing():
            return self.enter_traced()
        handle = self._policy_handle
        if handle is not None:
            push(handle)  # first: it may refuse, and then nothing has changed
        if enter(thread.regions, self, self._settings):
            _torch.record_enter(self.device, self.fast_dtype, self._enabled, self._keeps_casts)
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any:
        if _is_scripting():
            return None
        if _is_tracing():
            return self.exit_traced()
        modes_are_on = leave(thread.regions, self, self._settings)
        handle = self._policy_handle
        if handle is not None:
            pop(handle)
        if modes_are_on:
            _torch.record_exit()
        return False


def is_autocast_available(device_type: str | torch.device) -> bool:
    """Return whether `autocast` accepts `device_type`, whether or not such a device is present.

    Raises:
        RuntimeError: with torch's text, when it is no device type at all.
    """
    name = device_type_of(device_type)
    try:
        get_backend(name)
    except BackendNotFoundError:
        return _torch.autocast_known(name)
    return True


class disable:  # noqa: N801  # used as `with disable():`, beside `autocast`
    """A region, or decorator, without mixed precision on any device."""

    def __init__(self) -> None:
        self._entered: list[list[autocast]] = []

    def __enter__(self) -> "disable":
        active = [autocast(device, enabled=False) for device in _torch.autocast_devices_enabled()]
        for region in active:
            region.__enter__()
        self._entered.append(active)
        return self

    def __exit__(self, *exc: object) -> None:
        for region in reversed(self._entered.pop()):
            region.__exit__(None, None, None)

    def __call__(self, func: Callable[P, R]) -> Callable[P, R]:
        """Return `func` with its body run without mixed precision."""
        return autocast_decorator(self, func)
