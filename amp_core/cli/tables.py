"""Terminal tables, drawn by rich if installed, else as plain columns."""

from __future__ import annotations

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
        print("\n".join([title, *_plain([columns, *rows])]))
        return
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=(styles or {}).get(cell, "")) for cell in row))
    Console().print(table)


def _plain(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
