"""Charts in the HTML reports, drawn as inline SVG: no script, no other file."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 240, 60, 34
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito


class Point(NamedTuple):
    """One value: its place, the series that gives its colour, and the text shown on hovering."""

    x: float
    y: float
    series: str
    text: str


@dataclass(frozen=True)
class Chart:
    """Points over a linear x axis.

    Attributes:
        title: its heading.
        x: the title of the x axis.
        y: the title of the y axis.
        points: the values; inf and NaN stand at the top.
        limits: label to value of the lines drawn across: at y, or at x for bars.
        bars: draw bars on a linear y axis instead of dots on a logarithmic one.
    """

    title: str
    x: str
    y: str
    points: Sequence[Point]
    limits: Mapping[str, float] = field(default_factory=dict)
    bars: bool = False


def as_svg(chart: Chart) -> str:
    """Return the chart as SVG; empty without points."""
    if not chart.points:
        return ""
    across = [p.x for p in chart.points] + [*chart.limits.values()] * chart.bars
    x = _Axis(min(across) - 1, max(across) + 1, _LEFT, _WIDTH - 10)
    heights = [_height(p.y, chart) for p in chart.points if 0 < p.y < math.inf]
    heights += [math.log10(limit) for limit in chart.limits.values() if not chart.bars]
    low, high = min(heights, default=0.0), max(heights, default=1.0)
    y = _Axis(
        0.0 if chart.bars else math.floor(low), high if chart.bars else math.ceil(high + 0.1), _HEIGHT, 12
    )
    series = [*dict.fromkeys(p.series for p in chart.points)]
    parts = [_mark(p, chart, x, y, _COLOURS[series.index(p.series) % len(_COLOURS)]) for p in chart.points]
    parts += [_limit(label, value, chart, x, y) for label, value in chart.limits.items()]
    parts += [_tick(x.place(v), _HEIGHT + 14, f"{v:g}", "middle") for v in x.ticks()]
    parts += [
        _tick(_LEFT - 6, y.place(v) + 4, f"{v:.2g}" if chart.bars else f"1e{v:g}", "end") for v in y.ticks()
    ]
    titles = f"{html.escape(chart.x)}; {_legend(series)}"
    parts.append(_tick((_LEFT + _WIDTH) / 2, _HEIGHT + _BOTTOM - 4, titles, "middle"))
    frame = f'<path d="M{_LEFT} 12V{_HEIGHT}H{_WIDTH - 10}" fill="none" stroke="currentColor"/>'
    name = html.escape(f"{chart.y} by {chart.x}")
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT + _BOTTOM}"'
    return f'<svg {size} role="img" aria-label="{name}">{frame}{"".join(parts)}</svg>'


class _Axis(NamedTuple):
    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return round(self.start + min(1.0, max(0.0, share)) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 4 or 1.0))
        step *= next(m for m in (1, 2, 5, 10) if (self.high - self.low) / (step * m) <= 8)
        first = math.ceil(self.low / step)
        return [step * n for n in range(first, math.floor(self.high / step) + 1)]


def _height(y: float, chart: Chart) -> float:
    if not math.isfinite(y):
        return math.inf
    return y if chart.bars else math.log10(y) if y > 0 else -math.inf


def _mark(point: Point, chart: Chart, x: _Axis, y: _Axis, colour: str) -> str:
    left, top, text = x.place(point.x), y.place(_height(point.y, chart)), html.escape(point.text)
    if chart.bars:
        width = x.place(point.x + 0.9) - left
        shape = f'<rect x="{left}" y="{top}" width="{width:.1f}" height="{_HEIGHT - top:.1f}"'
    else:
        shape = f'<circle cx="{left}" cy="{top}" r="{3 if math.isfinite(point.y) else 5}"'
    return f'{shape} fill="{colour}" fill-opacity=".7"><title>{text}</title></{shape[1:].split()[0]}>'


def _limit(label: str, value: float, chart: Chart, x: _Axis, y: _Axis) -> str:
    place = x.place(value) if chart.bars else y.place(math.log10(value))
    path = f"M{place} 12V{_HEIGHT}" if chart.bars else f"M{_LEFT} {place}H{_WIDTH - 10}"
    text = html.escape(label)
    name = _tick(place, 10, text, "middle") if chart.bars else _tick(_WIDTH - 12, place - 3, text, "end")
    return f'<path d="{path}" stroke="#D55E00" stroke-dasharray="4"/>{name}'


def _tick(left: float, top: float, text: str, anchor: str) -> str:
    """Return a label; `text` is markup."""
    return f'<text x="{left}" y="{top}" text-anchor="{anchor}">{text}</text>'


def _legend(series: Sequence[str]) -> str:
    return ", ".join(
        f'<tspan fill="{_COLOURS[i % len(_COLOURS)]}">{html.escape(name)}</tspan>'
        for i, name in enumerate(series)
    )
