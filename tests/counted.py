"""How many functions a program calls: what takes the time of programs of small tensors, and does not vary."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def calls_of(program: Callable[[], object], modules: tuple[str, ...] | None = None) -> int:
    """Return how many functions `program` calls, those of C too; or how many in Python of `modules`.

    Args:
        program: what to run.
        modules: what the names of modules begin with.
    """
    calls = 0

    def count(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        if modules is None:
            calls += event in ("call", "c_call")
        else:
            calls += event == "call" and frame.f_globals.get("__name__", "").startswith(modules)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        program()
    finally:
        sys.setprofile(before)
    return calls
