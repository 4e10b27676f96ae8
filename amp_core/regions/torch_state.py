"""The autocast state of a thread, changed when a region is entered and put back when it is left.

Two forms: the one below, and `native/region_state.c`, a quarter of its time, where that was built and knows
torch's functions. `how` says which is in use, and why.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from amp_core._torch import internals as _torch
from amp_core._torch.dispatcher import constant_for_dynamo
from amp_core.common import environment as _env
from amp_core.states.region_stack import Frame, RegionStack

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
_modes_are_on = _torch.function_modes_are_on

# A NamedTuple's own constructor is a Python function and takes twice as long.
_new_frame = tuple.__new__

Settings = Any
"""What a region does to the state: device, enabled, dtype, whether casts are kept; see `settings_of`."""


def _enter(frames: RegionStack, region: Any, settings: Settings) -> bool:
    device, enabled, dtype, cached = settings
    was_enabled, was_dtype, was_cached = _is_enabled(device), _get_dtype(device), _is_cached()
    if was_enabled is not enabled:
        _set_enabled(device, enabled)
    if was_dtype is not dtype:
        _set_dtype(device, dtype)
        _clear_cache()  # torch's cache does not know which dtype it holds
    if was_cached is not cached:
        _set_cached(cached)
    frames.append(_new_frame(Frame, (region, (was_enabled, was_dtype, was_cached), _enter_nesting(), False)))
    return _modes_are_on()


def _leave(frames: RegionStack, region: Any, settings: Settings) -> bool:
    frame = frames.pop() if frames and frames[-1][0] is region else frames.take_out(region)
    depth = _leave_nesting()
    while depth >= frame.nesting:  # compiled code that raised has left regions without their exit
        depth = _leave_nesting()
    if not frame.superseded:
        _restore(settings[0], *frame.before)
    if depth == 0:
        _clear_cache()
    return _modes_are_on()


def _restore(device: str, enabled: bool, dtype: torch.dtype, cached: bool) -> None:
    # Compared with what is there, not with what entering changed: code inside may have set it.
    if _is_enabled(device) is not enabled:
        _set_enabled(device, enabled)
    if _get_dtype(device) is not dtype:
        _set_dtype(device, dtype)
        _clear_cache()
    if _is_cached() is not cached:
        _set_cached(cached)


@constant_for_dynamo
def settings_of(device: str, enabled: bool, dtype: torch.dtype, cached: bool) -> Settings:
    """Return what `enter` and `leave` are told: one number for the compiled form, else the four values."""
    if compiled is not None:
        number = _numbers.get((device, dtype))
        if number is None:
            number = _numbers[device, dtype] = _number_of(device, dtype)
        if number >= 0 and type(enabled) is type(cached) is bool:  # torch refuses others, in its own words
            return number | enabled | cached << 1
    return device, enabled, dtype, cached


def _load() -> tuple[Any, str]:
    if not _env.compiled():
        return None, f"Python ({_env.COMPILED} says so)"
    try:
        found: Any = importlib.import_module("amp_core.native._region_state")
        found.bind(_torch.library_path(), _enter, _leave)
    except ImportError as error:
        return None, f"Python ({error})"
    return found, "compiled code"


compiled, how = _load()

enter: Callable[[RegionStack, Any, Settings], bool] = compiled.enter if compiled else _enter
"""Put the settings in force and note on the stack, for the region, what was there before.

Returns:
    Whether a ``TorchFunctionMode`` is active, which may have to be told.
"""

leave: Callable[[RegionStack, Any, Settings], bool] = compiled.leave if compiled else _leave
"""Put back what was in force before the region was entered.

Returns:
    Whether a ``TorchFunctionMode`` is active.

Raises:
    RuntimeError: the region was not entered in this thread; nothing has changed.
"""

_numbers: dict[tuple[str, torch.dtype], int] = {}


def _number_of(device: str, dtype: torch.dtype) -> int:
    """Return the settings of a disabled region, once seen to be what torch understands; else -1."""
    device_number = _torch.device_number(device)
    if device_number is None:
        return -1
    was_enabled, was_dtype = _is_enabled(device), _get_dtype(device)
    try:
        _set_dtype(device, dtype)
        seen = []
        for enabled in (False, True):
            _set_enabled(device, enabled)
            seen.append(compiled.read(device_number))
    finally:
        _set_enabled(device, was_enabled)
        _set_dtype(device, was_dtype)
    off, on = seen
    return off & ~2 | device_number << 8 if on == off + 1 else -1
