"""Terminal tables, drawn by rich if installed, else as plain columns; as lists in a narrow terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence

_NARROWEST = 8
"""Characters of a column, borders included, below which rich leaves out what does not fit."""


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print a table.

    Args:
        title: a line above the table.
        columns: the headings.
        rows: one text per column.
        styles: cell text to rich style, such as ``{"failed": "red"}``.
    """
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        from amp_core.debugging.tables import aligned

        print("\n".join([title, *aligned([columns, *rows], [False] * len(columns))]))
        return
    console = Console()
    if console.width < _NARROWEST * len(columns):
        print("\n".join([title, *_lists(columns, rows)]))
        return
    table = Table(title=Text(title, style="table.title"))  # as a string, its brackets would be styles
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=(styles or {}).get(cell, "")) for cell in row))
    console.print(table)


def _lists(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line per cell that is not empty, with a row's others below its first."""
    return [
        f"{'  ' if index else ''}{column}: {cell}"
        for row in rows
        for index, (column, cell) in enumerate(zip(columns, row, strict=True))
        if cell
    ]


def terminal_width() -> int:
    """Return the width of the terminal, at most 80."""
    return min(shutil.get_terminal_size().columns, 80)


def wrapped(names: list[str]) -> list[str]:
    """Return `names` in indented lines that fit the terminal."""
    indent = " " * 4
    return textwrap.wrap(
        " ".join(names),
        terminal_width(),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
