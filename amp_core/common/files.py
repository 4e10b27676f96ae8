"""Paths of files, and whether they can be written."""

from __future__ import annotations

import tempfile
from os import PathLike
from pathlib import Path


def as_path(path: object) -> Path:
    """Return the path of a file.

    Raises:
        TypeError: `path` is no text and no path.
        ValueError: it is empty.
    """
    if not isinstance(path, (str, PathLike)):
        raise TypeError(f"path= must be the path of a file, not {path!r}.")
    if path == "":
        raise ValueError("path= is empty; pass the path of a file.")
    return Path(path)


def why_unwritable(path: Path) -> str:
    """Say why no file can be written at `path`; empty if one can. Leaves nothing behind."""
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
