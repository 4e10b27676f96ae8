"""Find the user code that called amp-core, for warnings and for the origins of policies."""

from __future__ import annotations

import sys


def level_outside(packages: tuple[str, ...] = ()) -> int:
    """Return the `stacklevel`, relative to the caller, of the first frame outside amp-core and `packages`."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and (_is_ours(frame.f_globals) or _package(frame.f_globals) in packages):
        level, frame = level + 1, frame.f_back
    return level


def place_outside(packages: tuple[str, ...] = ()) -> str:
    """Return file and line of the first frame outside amp-core and `packages`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (_is_ours(frame.f_globals) or _package(frame.f_globals) in packages):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_ours(names: dict[str, object]) -> bool:
    """Return whether a frame is ours, or that of a generator of ours as a context manager."""
    return str(names.get("__name__", "")).startswith(("amp_core.", "contextlib"))


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
