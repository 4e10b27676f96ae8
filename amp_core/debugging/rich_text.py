"""Render reports for the terminal with rich, if it is installed."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from amp_core.debugging.tables import Content, Table, cells, left_out


def as_rich(content: Content) -> Group:
    """Return `content` as a rich renderable."""
    facts = RichTable.grid(padding=(0, 2))
    for label, value in content.facts.items():
        facts.add_row(Text(label, style="bold"), Text(value))
    texts = [Text(f"\n{title}\n", style="bold").append(body, "none") for title, body in content.texts.items()]
    notes = [Text(f"Note: {note}", style="dim") for note in content.notes]
    return Group(Text(content.title, style="bold"), facts, *map(_table, content.tables), *texts, *notes)


def _table(table: Table) -> RichTable | Text:
    if not table.shown:
        return Text(f"\n{table.title}: {left_out(table) or 'none'}", style="bold")
    rich_table = RichTable(
        title=f"\n{table.title} ({len(table.rows)})",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        caption=left_out(table) or None,
    )
    for column in table.columns:
        rich_table.add_column(
            column.title, justify="left" if column.kind == "text" else "right", overflow="fold"
        )
    for row in cells(table):
        rich_table.add_row(*map(Text, row))
    return rich_table
