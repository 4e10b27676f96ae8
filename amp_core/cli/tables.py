"""Terminal tables, drawn by rich if installed, else as plain columns."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence


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
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=(styles or {}).get(cell, "")) for cell in row))
    Console().print(table)


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
