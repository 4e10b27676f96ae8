"""Find out before long work whether its result can be written."""

from __future__ import annotations

import tempfile
from pathlib import Path


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
