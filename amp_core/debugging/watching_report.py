"""The reports for `Watch` and `WatchDiff`."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable

from amp_core.debugging import saved
from amp_core.debugging.chart import Chart, Point
from amp_core.debugging.ranges import KINDS, Entry, Format
from amp_core.debugging.report import content_of
from amp_core.debugging.tables import Content, Table, Value, as_count, as_share, columns
from amp_core.debugging.watching import Watch, WatchDiff

_NAMED = "kind, name, "
_FIGURES = "smallest, largest, underflow, saturation, step=at step"


@content_of.register
def _(watch: Watch) -> Content:
    entries, form = watch.entries, watch.format
    rows = [_row(entry, form) for entry in _worst(entries, form).values()]
    rows.sort(key=lambda row: -max(row[5], row[6]))
    facts = {
        "format": f"{form.name}: normal numbers from 2^{form.normal}, subnormal from 2^{form.subnormal}, "
        f"up to 2^{form.largest}",
        "steps watched": as_count(len({e.step for e in entries})),
        "worst underflow": _most(entries, form.underflow),
        "worst saturation": _most(entries, form.saturation),
    }
    about = (
        "The step in which each tensor fits the format worst. Underflow: the share of its nonzero values "
        "that would become 0. Saturation: the share whose exponent of 2 is too large, or inf or NaN; larger "
        "numbers than the largest one do not count if they have its exponent."
    )
    spec = columns(_NAMED + "dtype, " + _FIGURES)
    return Content(
        f"What {form.name} would lose",
        facts,
        [],
        [
            Table("tensors", "Tensors", spec, rows, about),
            Table(
                "steps", "Every step", spec, [_row(e, form) for e in entries], "In order of computation.", 0
            ),
        ],
        charts=[_histogram(entries, form, kind) for kind in KINDS],
    )


def _histogram(entries: list[Entry], form: Format, kind: str) -> Chart:
    counts: Counter[int] = Counter()
    for entry in entries:
        if entry.kind == kind:
            counts.update(entry.exponents)
    total = sum(counts.values())
    points = [Point(e, n / total, kind, f"2^{e}: {as_share(n / total)}") for e, n in counts.items()]
    limits = {f"2^{form.subnormal}": form.subnormal, f"2^{form.largest}": form.largest}
    title = f"{kind.capitalize()}s against the range of {form.name}"
    return Chart(title, "exponent of 2", "share of the values", points, limits, bars=True)


def _row(entry: Entry, form: Format) -> tuple[str, str, str, Value, Value, float, float, int]:
    smallest = 2.0 ** min(entry.exponents) if entry.exponents else 0.0
    figures = smallest, entry.largest, form.underflow(entry), form.saturation(entry)
    return entry.kind, entry.name or "(the model)", entry.dtype, *figures, entry.step


def _loss(entry: Entry, form: Format) -> float:
    return max(form.underflow(entry), form.saturation(entry))


def _worst(entries: list[Entry], form: Format) -> dict[tuple[str, str], Entry]:
    worst: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        key = entry.kind, entry.name
        if key not in worst or _loss(entry, form) > _loss(worst[key], form):
            worst[key] = entry
    return worst


def _most(entries: list[Entry], measure: Callable[[Entry], float]) -> str:
    entry = max(entries, key=measure, default=None)
    if entry is None or not measure(entry):
        return "none"
    return f"{as_share(measure(entry))} of {entry.kind} {entry.name or '(the model)'} in step {entry.step}"


@content_of.register
def _(diff: WatchDiff) -> Content:
    here, there = _by_call(diff.here.entries), _by_call(diff.there.entries)
    rows = [
        (*_row(entry, diff.here.format)[:2], *pair, entry.step)
        for key, entry in here.items()
        if key in there and (pair := _pair(entry, there[key]))
    ]
    rows.sort(key=lambda row: (row[-1], -row[-2]))
    alone = len(here.keys() ^ there.keys())
    facts = saved.differences(diff.here.environment, diff.there.environment)
    facts["ranges"] = (
        f"{len(here.keys() & there.keys())} in both runs, {len(rows)} differ, {alone} in one only"
    )
    about = (
        "Where 1 % of the values moved, more or fewer are inf or NaN, or the largest one is not within a "
        "factor of 2. Moved: the share of the values whose exponent differs. The first steps come first, and "
        "in them what moved most."
    )
    spec = columns("kind, name, before=largest, after=largest there, moved, step=at step")
    return Content(
        "Two watched runs compared", facts, [], [Table("changes", "What changed", spec, rows, about)]
    )


def _by_call(entries: list[Entry]) -> dict[tuple[int, str, str, int], Entry]:
    """Return entries by step, kind, name and number: of a module that is called again there are several."""
    calls: defaultdict[tuple[int, str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        calls[entry.step, entry.kind, entry.name].append(entry)
    return {(*key, n): entry for key, each in calls.items() for n, entry in enumerate(each)}


def _pair(here: Entry, there: Entry) -> tuple[float, float, float] | None:
    mine, theirs = _all_exponents(here), _all_exponents(there)
    total = max(1, sum(mine.values()), sum(theirs.values()))
    moved = sum(abs(mine.get(e, 0) - theirs.get(e, 0)) for e in mine.keys() | theirs.keys()) / 2 / total
    smaller, larger = sorted((here.largest, there.largest))  # of the whole tensors, not of a sample
    same = moved < 0.01 and here.not_finite == there.not_finite and larger <= 2 * smaller
    return None if same else (here.largest, there.largest, moved)


def _all_exponents(entry: Entry) -> dict[float, int]:
    """Return how many values have each exponent: that of 0 is minus infinity, of inf and NaN infinity."""
    ends = {-math.inf: entry.zeros, math.inf: entry.not_finite}
    return ends | entry.exponents
