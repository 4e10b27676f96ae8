"""The stack of regions that a thread has entered, which may be left in any order."""

from __future__ import annotations

import threading
from typing import Any


class Frame:
    """One entered region.

    Attributes:
        region: the `autocast` instance.
        before: the previous autocast state of its device: enabled, dtype, cache enabled.
        nesting: the depth of the region, 1 for the outermost; None while it is being entered. It can be 0 or
            less: torch also counts exits without an entry.
        policies: the number of policies that the thread had pushed before, if the region pushes one; else
            None.
        superseded: whether a region entered later restores `before` instead.
        leaving: whether the region is being left. If an interrupt stops that, the next region completes it.
    """

    __slots__ = ("before", "leaving", "nesting", "policies", "region", "superseded")

    def __init__(self, region: Any, before: tuple[bool, Any, bool]) -> None:
        self.region = region
        self.before = before
        self.nesting: int | None = None
        self.policies: int | None = None
        self.superseded = False
        self.leaving = False


class RegionStack(list[Frame]):
    """The entered regions of one thread, outermost first."""

    def take_out(self, region: Any) -> Frame:
        """Remove and return the innermost frame of `region` that is neither being entered nor being left.

        A generator or coroutine may leave its region before one that was entered later. The later region
        stays active and takes over the state to restore.

        Raises:
            RuntimeError: the region was not entered in this thread.
        """
        for index in range(len(self) - 1, -1, -1):
            frame = self[index]
            if frame.region is region and frame.nesting is not None and not frame.leaving:
                return self._take_out(index)
        raise RuntimeError(
            f"{region!r} was left without having been entered in this thread. Enter and leave a region in "
            f"the same thread, as a `with` statement does."
        )

    def _take_out(self, index: int) -> Frame:
        frame = self.pop(index)
        later = self[index:]
        for heir in later:
            if heir.nesting is not None:
                heir.nesting -= 1
            if heir.policies is not None and frame.policies is not None:
                heir.policies -= 1
        for heir in later:
            if heir.region.device == frame.region.device:
                heir.before = frame.before
                frame.superseded = True
                break
        # The nesting counter is per thread: it must drop below that of the outermost remaining region.
        if frame.nesting is not None:
            frame.nesting += len(later)
        return frame


class _Thread(threading.local):
    def __init__(self) -> None:
        self.regions = RegionStack()


thread = _Thread()
