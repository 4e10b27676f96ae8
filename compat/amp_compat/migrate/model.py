"""What a migration says about a file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["changed", "review", "manual"]

CELL_MARK = "# amp-core notebook cell "
"""Starts the comment that separates the cells of a notebook read as one program."""


@dataclass(frozen=True)
class Finding:
    """One place in a file.

    Attributes:
        line: 1-based line; in a notebook, within the cell.
        column: 0-based column.
        level: ``changed`` (rewritten), ``review`` (rewritten, but read the message), or ``manual`` (left
            as it was: needs a human).
        name: the deprecated name that was met.
        message: what was done, or why nothing was done and what to write instead.
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
    """The outcome for one file; `error` says why it could not be read or written."""

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
    """The new text of a module, and the findings in it."""

    text: str
    findings: list[Finding] = field(default_factory=list)
