"""Install in the processes that ``multiprocessing`` spawns, too; what is forked is installed already."""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.context import get_spawning_popen
from typing import Any

from amp_compat._install import install


class Arguments(list[str]):
    """``sys.argv``, which a spawned process unpickles before it imports the program.

    Args:
        words: the arguments.
        deprecated_only: as for `install`.
    """

    def __init__(self, words: Iterable[str], deprecated_only: bool) -> None:
        super().__init__(words)
        self._deprecated_only = deprecated_only

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:  # such as in a checkpoint
            return list, ([*self],)
        return _installed, ([*self], self._deprecated_only)


def _installed(words: list[str], deprecated_only: bool) -> Arguments:
    install(deprecated_only=deprecated_only)
    return Arguments(words, deprecated_only)
