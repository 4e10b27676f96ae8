"""Two ways to do one thing, timed in turns in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """Median seconds of each side, and the median of the paired ratios; below 1, ours is faster.

    Where `unit` is ``"B"``, bytes in place of seconds; where it is empty, plain numbers.
    """

    name: str
    theirs: float
    ours: float
    ratio: float
    unit: str = "s"


def compare(
    name: str,
    theirs: Callable[[], object],
    ours: Callable[[], object],
    *,
    rounds: int = 15,
    calls: int = 1,
    before: Callable[[], object] = lambda: None,
) -> Ratio:
    """Time `theirs` and `ours` in turns, `calls` calls at a time, with `before` untimed ahead of each."""
    for side in (theirs, ours):
        before()
        side()
    pairs = [(_time(theirs, calls, before), _time(ours, calls, before)) for _ in enough(rounds)]
    return Ratio(
        name,
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(b / a for a, b in pairs),
    )


def enough(rounds: int) -> Iterator[int]:
    """Count to `rounds`; after a minute to three, after five minutes no further: long steps vary little."""
    start = time.monotonic()
    for i in range(rounds):
        taken = time.monotonic() - start
        if taken > 300 or (taken > 60 and i >= 3):
            return
        yield i


def _time(side: Callable[[], object], calls: int, before: Callable[[], object]) -> float:
    before()
    start = time.perf_counter()
    for _ in range(calls):
        side()
    return (time.perf_counter() - start) / calls
