"""Enter and leave regions: change the thread's autocast state and restore it.

An interrupt (Ctrl-C, or an exception raised by another thread or a signal handler) can arrive between any two
bytecodes. So a frame that records what to restore is pushed before anything changes, and every restoring step
is idempotent.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

import torch

from amp_core._torch import cast_cache
from amp_core._torch.autocast import function_modes_are_on, record_enter, record_exit, torch_autocast
from amp_core._torch.tracing import is_exporting
from amp_core.dispatch.activate import Activation, pushed, restore, take_out
from amp_core.errors import PolicyError
from amp_core.states.region_stack import Frame, RegionStack

# Bound once: every region calls these.
_is_enabled = torch.is_autocast_enabled
_set_enabled = torch.set_autocast_enabled
_get_dtype = torch.get_autocast_dtype
_set_dtype = torch.set_autocast_dtype
_is_cached = torch.is_autocast_cache_enabled
_set_cached = torch.set_autocast_cache_enabled
_enter_nesting = torch.autocast_increment_nesting
_entries = iter(_enter_nesting, None)
"""Enters at each ``next``. CPython takes interrupts after calls: a ``for`` binds the depth before it can."""
_leave_nesting = torch.autocast_decrement_nesting
_modes_are_on = function_modes_are_on


def enter(
    frames: RegionStack,
    region: Any,
    settings: tuple[str, bool, torch.dtype, bool],
    activation: Activation | None,
) -> None:
    """Apply `settings` and the policy, and record the previous state on the stack.

    Args:
        frames: the thread's regions.
        region: the region to enter.
        settings: device type, enabled, dtype, whether casts are cached.
        activation: the policy to push, if any.

    Raises:
        PolicyError: `torch.export` is tracing, and the exported program could not keep the region.
    """
    if frames and (frames[-1].leaving or frames[-1].nesting is None):
        _repair(frames)
    device, enabled, dtype, cached = settings
    before = was_enabled, was_dtype, was_cached = _is_enabled(device), _get_dtype(device), _is_cached()
    frame = Frame(region, before)
    frames.append(frame)
    try:
        if activation is not None:
            frame.policies = pushed()
            activation.push()
        if was_enabled is not enabled:
            _set_enabled(device, enabled)
        if was_dtype is not dtype:
            _set_dtype(device, dtype)
            cast_cache.clear_within_region()  # torch's cast cache does not record dtypes
        if was_cached is not cached:
            _set_cached(cached)
        for frame.nesting in _entries:
            break
        if _modes_are_on():
            if enabled and is_exporting():
                _check_that_torch_keeps(region, device, dtype)
            record_enter(device, dtype, enabled, cached)
    except BaseException:
        _undo(frames, frame)
        raise


def _check_that_torch_keeps(region: Any, device: str, dtype: torch.dtype) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch_autocast(device, dtype)
    except (UserWarning, RuntimeError) as error:
        raise PolicyError(
            f"torch.export cannot keep {region!r}, because the exported program enters torch's own regions: "
            f"{error} Write the casts into the model (x.float() before the op)."
        ) from error


def leave(frames: RegionStack, region: Any, settings: tuple[str, bool, torch.dtype, bool]) -> None:
    """Restore the state from before `region` was entered.

    Args:
        frames: the thread's regions.
        region: the region to leave.
        settings: as for `enter`.

    Raises:
        RuntimeError: the region was not entered in this thread; the state is left unchanged.
    """
    if (
        not frames
        or (top := frames[-1]).region is not region
        or (nesting := top.nesting) is None
        or top.leaving
    ):
        _leave_out_of_order(frames, region)
        return
    frame = top  # only now: `_is_at_work` looks for this name
    frame.leaving = True
    try:
        depth = _leave_nesting()
        if depth >= nesting:
            depth = _lower_nesting(nesting)
        if frame.policies is not None:
            restore(frame.policies)
        was_enabled, was_dtype, was_cached = frame.before
        if not frame.superseded:  # without a look at what there is: code inside may have changed it
            device = settings[0]
            _set_enabled(device, was_enabled)
            _set_dtype(device, was_dtype)
            _set_cached(was_cached)
        if depth <= 0:  # below 0 after an exit of torch's without an entry
            cast_cache.clear()
        elif settings[2] is not was_dtype:
            cast_cache.clear_within_region()
        frames.pop()
    except BaseException:
        _undo(frames, frame)
        raise
    if _modes_are_on():
        record_exit()


def _leave_out_of_order(frames: RegionStack, region: Any) -> None:
    if frames and (frames[-1].leaving or frames[-1].nesting is None):
        stopped, own = frames[-1], None
        for each in frames:
            if each.region is region and not each.leaving and each.nesting is not None:
                own = each
        if own is not None:
            own.leaving = True  # before the first call, which a stack that is nearly full may not take
        _repair(frames)
        if own not in frames and (own is not None or stopped.region is region):
            return
        if own is not None:
            own.leaving = False
    frame = frames.take_out(region)
    if frame.policies is not None:
        take_out(frame.policies)
        frame.policies = None
    frames.append(frame)
    leave(frames, region, (region.device, False, torch.float32, False))


def _lower_nesting(nesting: int) -> int:
    """Lower the nesting depth below `nesting`: compiled code that raises does not leave its regions."""
    depth = _enter_nesting() - 1
    _leave_nesting()
    while depth >= nesting:
        depth = _leave_nesting()
    return depth


def _undo(frames: RegionStack, frame: Frame) -> None:
    """Restore the state that `frame` recorded, wherever an interrupt arrived, and remove the frame."""
    frame.leaving = True
    if frame.policies is not None:
        restore(frame.policies)
    if not frame.superseded:
        device, (enabled, dtype, cached) = frame.region.device, frame.before
        _set_enabled(device, enabled)
        _set_dtype(device, dtype)
        _set_cached(cached)
    if frame.nesting is not None:
        _lower_nesting(frame.nesting)
    cast_cache.clear_within_region()  # what else follows a region may be what has failed
    if frame in frames:
        frames.remove(frame)


def _repair(frames: RegionStack) -> None:
    """Undo the top frames that an interrupt left half entered or half exited."""
    while frames and (frames[-1].leaving or frames[-1].nesting is None) and not _is_at_work(frames[-1]):
        _undo(frames, frames[-1])


def _is_at_work(frame: Frame) -> bool:
    """Whether this thread enters or leaves `frame` now: a finaliser may enter a region meanwhile."""
    caller: FrameType | None = sys._getframe(2)
    while caller is not None:
        if caller.f_code in _AT_WORK and caller.f_locals.get("frame") is frame:
            return True
        caller = caller.f_back
    return False


_AT_WORK = (enter.__code__, leave.__code__)
