"""Reports that render the same content as text, JSON, a terminal table or an HTML page."""

from __future__ import annotations

import html
import json
from functools import singledispatch
from os import PathLike
from typing import Any

from amp_core.common.files import as_path
from amp_core.common.text import json_value
from amp_core.debugging.page import as_page
from amp_core.debugging.tables import Content, Table, Value, as_text


@singledispatch
def content_of(report: object) -> Content:
    """Return the content of `report`; the ``*_report`` modules register a function for each type."""
    raise NotImplementedError(type(report).__name__)


class Report:
    """Base of reports that can be printed or saved as JSON or HTML."""

    def content(self) -> Content:
        """Return the content of the report."""
        return content_of(self)

    def __str__(self) -> str:
        return as_text(self.content())

    def __rich__(self) -> Any:
        from amp_core.debugging.rich_text import as_rich  # rich is optional

        return as_rich(self.content())

    def _repr_html_(self) -> str:
        """Return the page in a frame for notebooks, so that its styles do not affect theirs."""
        page = html.escape(as_page(self.content()))
        return f'<iframe srcdoc="{page}" style="border: 0; height: 36rem; width: 100%"></iframe>'

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return all facts, notes and tables as JSON, with inf and NaN as strings."""
        content = self.content()
        return json.dumps(
            {
                "title": content.title,
                "facts": dict(content.facts),
                "notes": list(content.notes),
                "texts": dict(content.texts),
                **{table.key: _records(table) for table in content.tables},
            },
            indent=indent,
        )

    def to_html(self, path: str | PathLike[str]) -> None:
        """Write a self-contained HTML page to `path`.

        Raises:
            OSError: the file cannot be written.
        """
        as_path(path).write_text(as_page(self.content()), encoding="utf-8")


def _records(table: Table) -> list[dict[str, Value]]:
    keys = [column.key for column in table.columns]
    return [dict(zip(keys, map(json_value, row), strict=True)) for row in table.rows]
