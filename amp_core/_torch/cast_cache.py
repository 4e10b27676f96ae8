"""When torch clears its cache of casts, as it does at the end of each outermost region."""

from __future__ import annotations

from collections.abc import Callable

import torch

from amp_core._torch.dynamo import never_compile
from amp_core.common.once import once


@once
def when_cleared(callback: Callable[[], None]) -> None:
    """From the first request on, call `callback` in each thread that clears torch's cache, as regions do."""
    _when_cleared.append(callback)
    _replace_clear()


@once
def when_regions_end(callback: Callable[[], None]) -> None:
    """From the first request on, call `callback` in each thread whose outermost region has ended."""
    _when_regions_end.append(callback)
    _replace_clear()


_when_cleared: list[Callable[[], None]] = []
_when_regions_end: list[Callable[[], None]] = []


def _replace_clear() -> None:
    global clear, clear_within_region  # most programs need no callback, and regions are short
    if clear is not _end_region:
        clear, clear_within_region = _end_region, _clear_alone
        never_compile(_end_region)
        never_compile(_clear_alone)
        setattr(torch, _CLEAR, _end_region)  # torch's regions end with it, too


def _end_region() -> None:
    _clear_alone()
    for callback in () if torch.compiler.is_dynamo_compiling() else _when_regions_end:
        callback()


def _clear_alone() -> None:
    _torchs_clear()
    for callback in () if torch.compiler.is_dynamo_compiling() else _when_cleared:
        callback()


_CLEAR = "clear_autocast_cache"
_torchs_clear: Callable[[], None] = getattr(torch, _CLEAR)
clear = _torchs_clear
"""Clears torch's cache. Each region ends with it, so it does nothing else until that is needed."""
clear_within_region = _torchs_clear
"""Clears it where no outermost region ends: after a step, or where the dtype changes."""
