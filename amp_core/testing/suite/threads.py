"""Run one call in the middle of another one, at every point where Python can switch threads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

import amp_core

_OTHERS = ("<", *(f"{module.__path__[0]}{os.sep}" for module in (amp_core, torch)))
_PYTHON = f"{os.path.dirname(os.__file__)}{os.sep}"  # as code objects name their files

Judged = Callable[[Callable[[], AbstractContextManager[Any]]], None]
"""Runs a call inside the context that its argument returns, and raises if the outcome is wrong."""


def interleave(make: Callable[[int], Judged], most: int) -> None:
    """Run the call ``make(0)`` with another one at up to `most` of its points; raise what either raises."""
    points = _run(make(0))
    late = 0
    for number, point in enumerate(range(0, points, points // most + 1)):
        patience, tries = (1.0, 2) if late < 2 else (0.01, 1)
        # A call that waits for a lock ends only after the one that it interrupts. A busy machine may delay
        # one that does not, but hardly twice.
        late += not any(_interrupt(make, point, 1 + number % 3, patience) for _ in range(tries))


def _interrupt(make: Callable[[int], Judged], point: int, number: int, patience: float) -> bool:
    """Run ``make(number)`` at a point of ``make(0)``; return whether it ended there, within `patience` s."""
    called, done = threading.Event(), threading.Event()

    @contextmanager
    def until_done() -> Iterator[None]:
        try:
            yield
        finally:
            called.set()
            done.wait()  # the outcome is judged after the call that it interrupts

    other = _Thread(make(number), until_done)
    in_time = False

    def meanwhile() -> None:
        nonlocal in_time
        other.start()
        in_time = called.wait(patience)

    try:
        _run(make(0), meanwhile, point)
    finally:
        done.set()
        if other.ident is not None:
            other.join()
    if other.outcomes:
        raise other.outcomes[0]
    return in_time or other.ident is None


class _Thread(threading.Thread):
    def __init__(self, judged: Judged, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.outcomes: list[BaseException] = []
        self._judged, self._context = judged, context

    def run(self) -> None:
        try:
            self._judged(self._context)
        except BaseException as error:  # an AssertionError, or whatever the call raised
            self.outcomes.append(error)


def _run(judged: Judged, meanwhile: Callable[[], None] | None = None, point: int = 0) -> int:
    """Run a call in a new thread, with `meanwhile` at a point of it; return the number of its points.

    A point is an instruction of the backend's own code that is run for the first time.
    """
    count, seen = 0, set()

    def trace(frame: Any, event: str, _argument: Any) -> Any:
        nonlocal count
        file = frame.f_code.co_filename
        if file.startswith(_OTHERS) or (file.startswith(_PYTHON) and "site-packages" not in file):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and (place := (frame.f_code, frame.f_lasti)) not in seen:
            seen.add(place)
            if meanwhile is not None and count == point:
                sys.settrace(None)
                meanwhile()
            count += 1
        return trace

    @contextmanager
    def traced() -> Iterator[None]:
        sys._getframe().f_trace_opcodes = True  # Python 3.12 traces instructions if a frame wants it by now
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(None)

    thread = _Thread(judged, traced)
    thread.start()
    thread.join()
    if thread.outcomes:
        raise thread.outcomes[0]
    return count
