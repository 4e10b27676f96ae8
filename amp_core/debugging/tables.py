"""The content of reports (facts, notes, tables) and its rendering as plain text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: its name in JSON.
        title: its heading.
        kind: how its values are formatted and sorted: ``text``, ``count``, ``bytes``, ``share`` (0 to 1,
            shown as a percentage) or ``number``.
    """

    key: str
    title: str
    kind: str = "text"


@dataclass(frozen=True)
class Table:
    """Rows of one kind, most important first.

    Attributes:
        key: its name in JSON.
        title: its heading.
        columns: the columns, in row order.
        rows: one tuple per row.
        about: a sentence or two on how to read it.
        shown: the number of rows that `print` shows; JSON and HTML have all.
    """

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: Sequence[tuple[Value, ...]]
    about: str = ""
    shown: int = 20


@dataclass(frozen=True)
class Content:
    """The content of a report.

    Attributes:
        title: the title of the report.
        facts: label to value, the most important first.
        notes: what a reader needs to know to interpret the figures.
        tables: the figures.
        texts: title to text shown verbatim, such as a file.
    """

    title: str
    facts: Mapping[str, str]
    notes: Sequence[str]
    tables: Sequence[Table]
    texts: Mapping[str, str] = field(default_factory=dict)


# Formatting of values.


def written(value: Value, kind: str) -> str:
    """Format `value`."""
    if value is None:
        return ""
    return _WRITERS[kind](value) if not isinstance(value, str) else value


def as_bytes(count: float) -> str:
    """Format a number of bytes with a suitable unit: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def as_share(share: float) -> str:
    """Format a share as a percentage; small nonzero shares stay distinct from 0."""
    if 0 < share < 0.001:
        return "<0.1 %"
    return f"{share:.1%}".replace("%", " %") if share else "0 %"


def as_count(count: float) -> str:
    """Format an integer with spaces between groups of three digits."""
    return f"{count:,}".replace(",", " ")


_WRITERS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "count": as_count,
    "bytes": as_bytes,
    "share": as_share,
    "number": lambda x: f"{x:.3g}",
}


# Plain text.


def as_text(content: Content) -> str:
    """Return `content` as plain text, with only the `shown` rows of each table."""
    width = max((len(label) for label in content.facts), default=0)
    lines = [content.title, "=" * len(content.title)]
    lines += [f"{label:<{width}}  {value}" for label, value in content.facts.items()]
    for table in content.tables:
        lines += ["", *_table_lines(table)]
    for title, text in content.texts.items():
        lines += ["", title, "-" * len(title), text.rstrip()]
    lines += [""] * bool(content.notes) + [f"Note: {note}" for note in content.notes]
    return "\n".join(lines)


def cells(table: Table) -> list[list[str]]:
    """Return the formatted cells of the rows shown in text."""
    kinds = [column.kind for column in table.columns]
    return [[written(v, k) for v, k in zip(row, kinds, strict=True)] for row in table.rows[: table.shown]]


def left_out(table: Table) -> str:
    """Return a note on the number of rows not shown in text; empty if none."""
    rest = len(table.rows) - table.shown
    more = "more rows" if table.shown else "rows"
    return f"{rest} {more} in to_json() and to_html()" if rest > 0 else ""


def _table_lines(table: Table) -> list[str]:
    heading = f"{table.title} ({len(table.rows)})"
    lines = [heading, "-" * len(heading)]
    if not table.rows or not table.shown:
        return [*lines, left_out(table) or "none"]
    rows = cells(table)
    titles = [column.title for column in table.columns]
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]
    right = [column.kind != "text" for column in table.columns]

    def line(row: list[str]) -> str:
        pairs = zip(row, widths, right, strict=True)
        return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in pairs).rstrip()

    rest = left_out(table)
    return [*lines, line(titles), *map(line, rows), *([rest] if rest else [])]
