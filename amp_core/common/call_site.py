"""Find the user code that called amp-core, for warnings and for the origins of policies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def level_outside(packages: tuple[str, ...] = ()) -> int:
    """Return the `stacklevel`, relative to the caller, of the first frame outside amp-core and `packages`."""
    return _outside(packages)[0]


def place_outside(packages: tuple[str, ...] = ()) -> str:
    """Return file and line of the first frame outside amp-core and `packages`."""
    _, frame = _outside(packages)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def callers() -> Iterator[FrameType]:
    """Return the frames that called the function that asks, the innermost first."""
    return _from(sys._getframe(2))


def _from(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _outside(packages: tuple[str, ...]) -> tuple[int, FrameType]:
    frames = callers()
    next(frames)  # asks for the level, or the place
    return next(
        (level, frame)
        for level, frame in enumerate(frames, 1)
        if frame.f_back is None or not (_is_ours(frame.f_globals) or _package(frame.f_globals) in packages)
    )


def _is_ours(names: dict[str, object]) -> bool:
    """Return whether a frame is ours, or between two of ours: of ``contextlib``, or of Dynamo."""
    between = ("contextlib", "torch._compile", "torch._dynamo.")
    return str(names.get("__name__", "")).startswith(("amp_core.", *between))


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
