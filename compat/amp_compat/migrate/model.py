"""Data classes for migration results."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["changed", "review", "manual"]

CELL_MARK = "# amp-core notebook cell "
"""Prefix of the comment that separates notebook cells joined into one program."""


@dataclass(frozen=True)
class Finding:
    """One place in a file.

    Attributes:
        line: 1-based line; in a notebook, within the cell.
        column: 0-based column.
        level: ``changed`` (rewritten), ``review`` (rewritten, but check the message), or ``manual``
            (unchanged; rewrite it by hand).
        name: the deprecated name.
        message: the change, or why there is none and what to write instead.
        cell: 1-based number of the code cell, in a notebook.
    """

    line: int
    column: int
    level: Level
    name: str
    message: str
    cell: int | None = None


@dataclass
class FileReport:
    """The result for one file; `error` says why it could not be read or written."""

    path: str
    findings: list[Finding] = field(default_factory=list)
    error: str | None = None
    changed: bool = False
    written: bool = False
    diff: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``, without the diff if it is empty."""
        data = asdict(self)
        if not self.diff:
            del data["diff"]
        return data


@dataclass
class Rewritten:
    """The new source of a module and its findings."""

    text: str
    findings: list[Finding] = field(default_factory=list)
