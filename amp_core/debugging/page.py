"""Render reports as a self-contained HTML page with sortable, filterable tables."""

from __future__ import annotations

import math
from html import escape as _e

from amp_core.debugging.chart import Chart, as_svg
from amp_core.debugging.tables import Content, Table, Value, written


def as_page(content: Content) -> str:
    """Return `content` as an HTML document without external resources."""
    sections = [_section(table) for table in content.tables]
    links = [f'<a href="#{t.key}">{_e(t.title)} <i>{len(t.rows)}</i></a>' for t in content.tables]
    return _PAGE.format(
        title=_e(content.title),
        style=_STYLE,
        script=_SCRIPT,
        facts="".join(f"<dt>{_e(k)}</dt><dd>{_e(v)}</dd>" for k, v in content.facts.items()),
        notes="".join(f'<p class="note">{_e(note)}</p>' for note in content.notes),
        links="".join(links),
        texts="".join(
            f"<section><h2>{_e(t)}</h2><pre>{_e(s)}</pre></section>" for t, s in content.texts.items()
        ),
        charts="".join(_chart(chart) for chart in content.charts),
        sections="".join(sections),
    )


def _chart(chart: Chart) -> str:
    svg = as_svg(chart)
    return f"<section><h2>{_e(chart.title)}</h2>{svg}</section>" if svg else ""


def _section(table: Table) -> str:
    heading = f'<h2 id="{table.key}">{_e(table.title)} <i>{len(table.rows)}</i></h2>'
    about = f'<p class="about">{_e(table.about)}</p>' if table.about else ""
    if not table.rows:
        return f"<section>{heading}{about}<p>None.</p></section>"
    search = '<input type="search" placeholder="filter rows" aria-label="filter rows">'
    titles = "".join(
        f'<th scope="col" class="{c.kind}" aria-sort="none"><button>{_e(c.title)}</button></th>'
        for c in table.columns
    )
    rows = "".join(f"<tr>{_cells(table, row)}</tr>" for row in table.rows)
    body = f"<div class=scroll><table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table></div>"
    return f"<section>{heading}{about}{search if len(table.rows) > 8 else ''}{body}</section>"


def _cells(table: Table, row: tuple[Value, ...]) -> str:
    kinds = [column.kind for column in table.columns]
    return "".join(_cell(value, kind) for value, kind in zip(row, kinds, strict=True))


def _cell(value: Value, kind: str) -> str:
    text = _e(written(value, kind))
    if kind == "text":
        return f"<td>{text if ' ' in text else text.replace('.', '.<wbr>')}</td>"
    bad = " bad" if isinstance(value, float) and not math.isfinite(value) else ""
    return f'<td class="{kind}{bad}" data-v="{_sortable(value)}">{text}</td>'


def _sortable(value: Value) -> str:
    """Return the sort key: missing values sort first, non-finite values last."""
    if value is None:
        return "-1"
    if isinstance(value, (int, float)) and not math.isnan(value):
        return repr(min(float(value), 1e308))
    return "1e308"


_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --mark: #D55E00; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1400px; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
h2 i, nav i { font-style: normal; font-weight: normal; opacity: .6; font-size: .85em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; margin: 0; }
dt { font-weight: 600; } dd { margin: 0; }
nav { display: flex; flex-wrap: wrap; gap: .4rem; margin-top: 1.2rem; }
nav a { border: 1px solid var(--line); border-radius: 99px; color: inherit; padding: .1rem .8rem; text-decoration: none; }
nav a:hover { border-color: var(--mark); }
.note { border-left: 3px solid var(--mark); margin: 1rem 0 0; max-width: 60rem; padding-left: .8rem; }
.about { margin: 0 0 .6rem; max-width: 60rem; opacity: .8; }
input { font: inherit; margin-bottom: .5rem; padding: .2rem .5rem; width: 16rem; max-width: 100%; }
.scroll { overflow: auto; max-height: 36rem; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .92em; }
th { background: Canvas; position: sticky; top: 0; box-shadow: inset 0 -1px var(--line); padding: 0; text-align: left; }
th { vertical-align: bottom; }
th button { all: unset; box-sizing: border-box; cursor: pointer; padding: .4rem .7rem; width: 100%; }
th button:hover, th button:focus-visible { color: var(--mark); }
th[aria-sort=ascending] button::after { content: " \\2191"; } th[aria-sort=descending] button::after { content: " \\2193"; }
td:first-child { min-width: 9rem; }
td { padding: .25rem .7rem; border-top: 1px solid var(--line); vertical-align: top; }
tbody tr:hover { background: var(--soft); }
.count, .bytes, .share, .number { text-align: right; font-variant-numeric: tabular-nums; }
td.count, td.bytes, td.share, td.number { white-space: nowrap; }
.bad { color: var(--mark); font-weight: 600; }
svg { font-size: 12px; max-width: 60rem; width: 100%; }
svg text { fill: currentColor; }
pre { background: var(--soft); border-radius: 6px; overflow: auto; padding: .8rem; }
@media print { .scroll { max-height: none; overflow: visible; } input, nav { display: none; } }
"""

_SCRIPT = """
for (const section of document.querySelectorAll("section")) {
  const body = section.querySelector("tbody");
  if (!body) continue;
  const heads = [...section.querySelectorAll("th")];
  heads.forEach((head, i) => head.firstChild.addEventListener("click", () => {
    const number = !head.classList.contains("text");
    const was = head.ariaSort;
    const up = was === "none" ? !number : was === "descending";
    heads.forEach(h => h.ariaSort = "none");
    head.ariaSort = up ? "ascending" : "descending";
    const value = row => number ? +row.cells[i].dataset.v : row.cells[i].textContent;
    const compare = (a, b) => number ? value(a) - value(b) : value(a).localeCompare(value(b), "en", {numeric: true});
    const rows = [...body.rows].sort(compare);
    body.append(...(up ? rows : rows.reverse()));
  }));
  const search = section.querySelector("input");
  if (search) search.addEventListener("input", () => {
    const wanted = search.value.toLowerCase();
    for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<dl>{facts}</dl>
{notes}
<nav>{links}</nav>
{texts}
{charts}
{sections}
<script>{script}</script>
</body>
</html>
"""
