"""`disable`: a region that switches mixed precision off on every device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from typing_extensions import ParamSpec

from amp_core._torch.autocast import autocast_devices_enabled
from amp_core._torch.context_manager import ContextManager, Step
from amp_core._torch.dynamo import autocast_step, trace_as_context_manager, when_loaded
from amp_core._torch.tracing import is_exporting
from amp_core.common.arguments import device_type_of
from amp_core.regions.decorator import around_generator, autocast_decorator
from amp_core.regions.region import autocast
from amp_core.states.region_stack import thread

P = ParamSpec("P")
R = TypeVar("R")


class _Entry:
    """An entry of `of`, which is None once it is being left; the next one completes what is stopped."""

    __slots__ = ("of", "regions")

    def __init__(self, of: disable) -> None:
        self.of: disable | None = of
        self.regions: list[autocast] = []


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entered: list[_Entry] = []


_thread = _Thread()


class disable:  # noqa: N801  # used as `with disable():`, beside `autocast`
    """A context manager or decorator that switches mixed precision off on every device.

    It takes no arguments. An instance is reentrant, and several threads can use it at once. The previous
    autocast state of every device is restored on exit.

    Raises:
        RuntimeError: the region is left in a thread that did not enter it.

    Example:
        >>> import torch, amp_core
        >>> x = torch.ones(2, 2)
        >>> with amp_core.autocast("cpu"), amp_core.disable():
        ...     (x @ x).dtype
        torch.float32
        >>> @amp_core.disable()
        ... def exact(a):
        ...     return a @ a
        >>> with amp_core.autocast("cpu"):
        ...     exact(x).dtype
        torch.float32
    """

    def __enter__(self) -> disable:
        entry = _Entry(self)
        _thread.entered.append(entry)
        try:
            for device in _devices():
                entry.regions.append(autocast(device, enabled=False))
                entry.regions[-1].__enter__()
        except BaseException:
            entry.of = None  # before the first call, which a stack that is nearly full may not take
            _leave(entry)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        entered = _thread.entered
        # No generator: Python drops an interrupt that comes while one is closed.
        for last in reversed(range(len(entered))):
            if entered[last].of is self:
                break
        else:
            raise RuntimeError(
                "amp_core.disable() was left without having been entered in this thread. Enter and leave it "
                "in the same thread, as a `with` statement does."
            )
        entered[last].of = None
        for entry in reversed(entered[last:]):
            if entry.of is None:
                _leave(entry)

    def __call__(self, func: Callable[P, R]) -> Callable[P, R]:
        """Return `func` with its body run without mixed precision; see `autocast_decorator`."""
        return autocast_decorator(self, func)


def _devices() -> list[str]:
    """Return the device types to switch off: an exported program may be called where other regions are on."""
    enabled = autocast_devices_enabled()
    return [*dict.fromkeys([*enabled, "cpu", device_type_of("auto")])] if is_exporting() else enabled


def _leave(entry: _Entry) -> None:
    while entry.regions:
        region, entered = entry.regions[-1], [frame.region for frame in thread.regions]
        if region in entered:  # or an interrupt came before it was
            region.__exit__(None, None, None)
        entry.regions.pop()
    _thread.entered.remove(entry)


def _steps() -> list[Step]:
    regions = [autocast(device, enabled=False) for device in _devices()]
    return [autocast_step(r.device, r.fast_dtype, False, r._keeps_casts) for r in regions]


when_loaded(
    lambda: trace_as_context_manager(
        [disable], ContextManager(lambda _instance: (), _steps, disable, around_generator)
    )
)
