"""Entering and leaving a region."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch

import amp_core
from benchmarks.ab import Ratio, compare


class _Entered(threading.local):
    def __init__(self) -> None:
        self.before: list[tuple[bool, torch.dtype, bool]] = []


_entered = _Entered()


class Reentrant(torch.autocast):
    """The least change to torch's region that lets it be entered again, and by several threads at once."""

    def __enter__(self) -> Reentrant:
        device, modes_are_on = self.device, torch._C._is_torch_function_mode_enabled
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        _entered.before.append((enabled, dtype, torch.is_autocast_cache_enabled()))
        torch.set_autocast_enabled(device, self._enabled)
        torch.set_autocast_dtype(device, self.fast_dtype)
        torch.autocast_increment_nesting()
        torch.set_autocast_cache_enabled(self._cache_enabled)
        modes_are_on()
        return self

    def __exit__(self, *_: object) -> Any:
        device, modes_are_on = self.device, torch._C._is_torch_function_mode_enabled
        enabled, dtype, cached = _entered.before.pop()
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cached)
        modes_are_on()
        return False


def run() -> Iterator[Ratio]:
    """Compare one instance used again, a new one each time, and the decorator; outermost and nested.

    The limit is what torch's region takes if it keeps what to restore for each entry and thread.
    """
    theirs, ours, least = torch.autocast("cpu"), amp_core.autocast("cpu"), Reentrant("cpu")
    decorated = [region(_nothing) for region in (theirs, ours)]
    for where, outer in (("outermost", False), ("nested", True)):
        with torch.autocast("cpu", enabled=outer):
            again = f"one region again, {where}"
            yield compare(again, lambda: _enter(theirs), lambda: _enter(ours), calls=5000)
            yield compare(f"{again}: limit", lambda: _enter(theirs), lambda: _enter(least), calls=5000)
            yield compare(
                f"a new region, {where}",
                lambda: _enter(torch.autocast("cpu")),
                lambda: _enter(amp_core.autocast("cpu")),
                calls=5000,
            )
            yield compare(f"decorated function, {where}", *decorated, calls=5000)


def _enter(region: torch.autocast) -> None:
    with region:
        pass


def _nothing() -> None:
    pass
