"""The regions that a thread is in, and how it leaves them in whatever order."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch


class Frame(NamedTuple):
    """One entered region, and the autocast state of its device as it was before.

    Attributes:
        region: the `autocast` instance.
        enabled: whether autocast was on for the device.
        dtype: its dtype.
        cached: whether casts of weights were kept.
        nesting: the depth of the region, 1 for the outermost.
        superseded: a region entered later has taken over what is to be restored.
    """

    region: Any
    enabled: bool
    dtype: torch.dtype
    cached: bool
    nesting: int
    superseded: bool


class RegionStack(list[Frame]):
    """The entered regions of one thread, outermost first."""

    def take_out(self, region: Any) -> Frame:
        """Take off and return the innermost frame of `region`, which is not the last entered.

        A generator or coroutine may leave its region before one that was entered later. That one
        stays in force, and inherits what there is to restore.

        Raises:
            RuntimeError: the region was not entered in this thread.
        """
        for i in range(len(self) - 1, -1, -1):
            if self[i].region is region:
                return self._take_out(i)
        raise RuntimeError(
            f"{region!r} is left without having been entered in this thread. A region is entered and left "
            f"by the same thread, as a `with` statement does."
        )

    def _take_out(self, index: int) -> Frame:
        frame = self.pop(index)
        later = [f._replace(nesting=f.nesting - 1) for f in self[index:]]
        for i, heir in enumerate(later):
            if heir.region.device == frame.region.device:
                later[i] = heir._replace(enabled=frame.enabled, dtype=frame.dtype, cached=frame.cached)
                frame = frame._replace(superseded=True)
                break
        self[index:] = later
        # The nesting counter is one for the thread: it must fall below the outermost that is left.
        return frame._replace(nesting=frame.nesting + len(later))


class _Thread(threading.local):
    def __init__(self) -> None:
        self.regions = RegionStack()


thread = _Thread()
