"""Progress messages on stderr for a long search."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable


def progress_line(shown: bool | None) -> Callable[[str], None]:
    """Return a function that prints numbered progress messages; by default only on a terminal."""
    if not (sys.stderr.isatty() if shown is None else shown):
        return lambda _words: None
    numbers = itertools.count(1)

    def show(words: str) -> None:
        sys.stderr.write(f"advise: run {next(numbers)}, {words}\n")
        sys.stderr.flush()

    return show
