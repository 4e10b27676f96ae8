"""The content of reports (facts, notes, tables) and its rendering as plain text."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amp_core.debugging.chart import Chart
from amp_core.policy.rules import as_work

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: its name in JSON.
        title: its heading.
        kind: how its values are formatted and sorted: ``text``, ``count``, ``bytes``, ``share`` (0 to 1,
            shown as a percentage), ``seconds``, ``work`` (floating-point operations) or ``number``.
    """

    key: str
    title: str
    kind: str = "text"


_KINDS = {
    "count": "calls call forward backward casts repeats order step",
    "bytes": "bytes repeated_bytes",
    "share": "overflow underflow saturation moved",
    "seconds": "float32 low chained",
    "work": "work",
    "number": "error added smallest largest before after",
}
_KIND_OF = {key: kind for kind, keys in _KINDS.items() for key in keys.split()}


def columns(spec: str) -> tuple[Column, ...]:
    """Return the columns of ``"key, key=title, ..."``; the key decides the kind."""
    parts = (part.strip().partition("=") for part in spec.split(","))
    return tuple(Column(key, title or key, _KIND_OF.get(key, "text")) for key, _, title in parts)


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
        charts: shown in HTML, above the tables.
    """

    title: str
    facts: Mapping[str, str]
    notes: Sequence[str]
    tables: Sequence[Table]
    texts: Mapping[str, str] = field(default_factory=dict)
    charts: Sequence[Chart] = ()


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
    """Format a share as a percentage; small nonzero shares stay distinct from 0, and large ones from 1."""
    if 0 < share < 0.001:
        return "<0.1 %"
    if 0.999 < share < 1:
        return ">99.9 %"
    return f"{share:.1%}".replace("%", " %") if share else "0 %"


def as_count(count: float) -> str:
    """Format an integer with spaces between groups of three digits."""
    return f"{count:,}".replace(",", " ")


def as_seconds(seconds: float) -> str:
    """Format a time in milliseconds."""
    return f"{seconds * 1e3:.3g} ms"


_WRITERS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "count": as_count,
    "bytes": as_bytes,
    "share": as_share,
    "seconds": as_seconds,
    "work": as_work,
    "number": lambda x: f"{x:.3g}",
}


# Plain text.

_WIDTH = 80


def as_text(content: Content) -> str:
    """Return `content` in 80 columns of plain text, with only the `shown` rows of each table."""
    width = max((len(label) for label in content.facts), default=0)
    lines = [content.title, "=" * len(content.title)]
    for label, value in content.facts.items():
        lines += _wrapped(f"{label:<{width}}  {value}", width + 2)
    for table in content.tables:
        lines += ["", *_table_lines(table)]
    for title, text in content.texts.items():
        lines += ["", *_wrapped(title), "-" * min(len(title), _WIDTH), text.rstrip()]
    notes = (_wrapped(f"Note: {note}") for note in content.notes)
    return "\n".join([*lines, *[""] * bool(content.notes), *itertools.chain(*notes)])


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


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
    rest = left_out(table)
    if not table.rows or not table.shown:
        return [heading, "-" * len(heading), rest or "none"]
    titles, right = [c.title for c in table.columns], [c.kind != "text" for c in table.columns]
    return [heading, "-" * len(heading), *_fitting(titles, cells(table), right), *[rest] * bool(rest)]


def _fitting(titles: list[str], rows: list[list[str]], right: list[bool]) -> list[str]:
    """Fit a table into the width: say once what is the same in all rows, then put numbers below texts."""
    lines = aligned([titles, *rows], right)
    if max(map(len, lines)) <= _WIDTH:
        return lines
    same = [len(rows) > 1 and len(set(column)) == 1 for column in zip(*rows, strict=True)]
    above = [f"{title} {cell or '-'}" for title, cell, s in zip(titles, rows[0], same, strict=True) if s]
    lines = _wrapped(f"in all rows: {', '.join(above)}", 2) if above else []
    others = [i for i, s in enumerate(same) if not s]
    heads = _heads([titles[i] for i in others])
    table = aligned([*heads, *([row[i] for i in others] for row in rows)], [right[i] for i in others])
    if max(map(len, table)) <= _WIDTH:
        return [*lines, *table]
    texts, numbers = ([i for i in others if right[i] is kind] for kind in (False, True))
    heads = _heads([titles[i] for i in numbers])
    figures = aligned([*heads, *([row[i] for i in numbers] for row in rows)], [True] * len(numbers))
    lines += _wrapped("; ".join(titles[i] for i in texts), 2)
    lines += [f"    {line}" for line in figures[: len(heads)]]
    for row, line in zip(rows, figures[len(heads) :], strict=True):
        lines += _wrapped("; ".join(row[i] or "-" for i in texts), 2) + [f"    {line}"] * bool(line)
    return lines


def _heads(titles: list[str]) -> list[tuple[str, ...]]:
    """Return the lines of a heading in which each word of a title has its own."""
    return [*itertools.zip_longest(*(title.split() for title in titles), fillvalue="")]


def aligned(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Return a line per row, with the cells in columns; `right` says which are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]
