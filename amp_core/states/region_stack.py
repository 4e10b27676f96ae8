"""The regions that a thread is in, and how it leaves them in whatever order."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple


class Frame(NamedTuple):
    """One entered region.

    Attributes:
        region: the `autocast` instance.
        before: the autocast state of its device as it was, in the form of `amp_core.regions.torch_state`.
        nesting: the depth of the region, 1 for the outermost.
        superseded: a region entered later has taken over what is to be restored.
    """

    region: Any
    before: Any
    nesting: int
    superseded: bool


class RegionStack(list[Frame]):
    """The entered regions of one thread, outermost first."""

    def take_out(self, region: Any) -> Frame:
        """Take off and return the innermost frame of `region`.

        A generator or coroutine may leave its region before one that was entered later. That one
        stays in force, and inherits what there is to restore.

        Raises:
            RuntimeError: the region was not entered in this thread.
        """
        for i in range(len(self) - 1, -1, -1):
            if self[i][0] is region:
                return self._take_out(i)
        raise RuntimeError(
            f"{region!r} is left without having been entered in this thread. A region is entered and left "
            f"by the same thread, as a `with` statement does."
        )

    def _take_out(self, index: int) -> Frame:
        frame = Frame._make(self.pop(index))
        later = [Frame(region, before, nesting - 1, over) for region, before, nesting, over in self[index:]]
        for i, heir in enumerate(later):
            if heir.region.device == frame.region.device:
                later[i] = heir._replace(before=frame.before)
                frame = frame._replace(superseded=True)
                break
        self[index:] = later
        # The nesting counter is one for the thread: it must fall below the outermost that is left.
        return frame._replace(nesting=frame.nesting + len(later))


class _Thread(threading.local):
    def __init__(self) -> None:
        self.regions = RegionStack()


thread = _Thread()
