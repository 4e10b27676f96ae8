"""Packages that only some features need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needing(package: str, install: str) -> Iterator[None]:
    """Say in a block of imports what to install if `package` is missing.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        text = f"this needs {package}; install it with: pip install '{install}'"
        raise ModuleNotFoundError(text, name=package) from error
