"""The report for `RecordingDiff`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

from amp_core.debugging import saved
from amp_core.debugging.places import Place
from amp_core.debugging.recording import Recording, RecordingDiff
from amp_core.debugging.recording_report import NO_RULE, facts_of, kind_of
from amp_core.debugging.report import content_of
from amp_core.debugging.tables import Content, Table, columns
from amp_core.policy.names import short

_Key = tuple[Place, str, str]
"""A module, a pass, and what ran there."""

C = TypeVar("C", bound=Hashable)


@content_of.register
def _(diff: RecordingDiff) -> Content:
    here, there = facts_of(diff.here), facts_of(diff.there)
    facts = saved.differences(diff.here.environment, diff.there.environment)
    for fact in dict.fromkeys([*here, *there]):  # there may be collectives, or a plan, in one only
        mine, theirs = here.get(fact, "-"), there.get(fact, "-")
        facts[fact] = mine if mine == theirs else f"{mine}  ->  {theirs}"
    tables = [_ops(diff), _casts(diff), _collectives(diff)]
    return Content("Two recordings compared", facts, [], tables)


def _ops(diff: RecordingDiff) -> Table:
    rows = [(*_start(key), *_calls(*pair), _rules(*pair)) for key, *pair in _differing(diff, _by_call)]
    about = (
        "Ops that ran in other dtypes or a different number of times: the kernel's input dtypes and calls, "
        "and the dtype of the result if only that differs."
    )
    spec = columns("module, pass, op, here=first, there=second, why=rule")
    return Table("changes", "What changed", spec, rows, about, 50)


def _casts(diff: RecordingDiff) -> Table:
    rows = [(*_start(key), *_pair(*pair)) for key, *pair in _differing(diff, _by_cast)]
    about = "Conversions between other floating-point dtypes, or a different number of them."
    spec = columns("module, pass, of, here=first, there=second")
    return Table("casts", "Casts that changed", spec, rows, about)


def _collectives(diff: RecordingDiff) -> Table:
    rows = [(*_start(key), *_pair(*pair)) for key, *pair in _differing(diff, _by_collective)]
    about = "What ranks exchanged in other dtypes, or a different number of times."
    spec = columns("module, pass, collective, here=first, there=second")
    return Table("collectives", "Collectives that changed", spec, rows, about)


def _start(key: _Key) -> tuple[str, str, str]:
    place, phase, what = key
    return str(place), phase, what


def _differing(
    diff: RecordingDiff, count: Callable[[Recording], Iterable[tuple[_Key, C, int]]]
) -> Iterator[tuple[_Key, Counter[C], Counter[C]]]:
    """Yield what both recordings count differently."""
    here, there = _summed(count(diff.here)), _summed(count(diff.there))
    for key in dict.fromkeys([*here, *there]):
        mine, theirs = here.get(key, Counter()), there.get(key, Counter())
        if mine != theirs:
            yield key, mine, theirs


def _summed(counts: Iterable[tuple[_Key, C, int]]) -> dict[_Key, Counter[C]]:
    sums: defaultdict[_Key, Counter[C]] = defaultdict(Counter)
    for key, how, calls in counts:
        sums[key][how] += calls
    return sums


_Call = tuple[str, str, str]
"""The dtypes of the inputs, that of the result, and the rule."""


def _by_call(recording: Recording) -> Iterator[tuple[_Key, _Call, int]]:
    """Yield calls by kernel only, because a policy changes which ops autocast intercepts."""
    for key, calls in recording.ops.items():
        yield (key.place, key.phase, short(key.kernel)), (key.dtypes, key.result, key.rule), calls


def _by_cast(recording: Recording) -> Iterator[tuple[_Key, str, int]]:
    """Yield casts whatever they were made for, for the same reason."""
    for key, count in recording.casts.items():
        of = f"{kind_of(key)} {key.weight}".rstrip()
        yield (key.place, key.phase, of), f"{key.source} to {key.result}", count.calls


def _by_collective(recording: Recording) -> Iterator[tuple[_Key, str, int]]:
    for key, count in recording.collectives.items():
        yield (key.place, key.phase, f"{key.kind} of {key.of}"), key.dtype, count.calls


def _calls(here: Counter[_Call], there: Counter[_Call]) -> tuple[str, str]:
    mine, theirs = ([(dtypes, n) for (dtypes, _, _), n in calls.items()] for calls in (here, there))
    if _total(mine) == _total(theirs):
        mine, theirs = ([(_to(call), n) for call, n in calls.items()] for calls in (here, there))
    return _counts(_total(mine)) or "not called", _counts(_total(theirs)) or "not called"


def _to(call: _Call) -> str:
    dtypes, result, _ = call
    return dtypes if dtypes == result else f"{dtypes} to {result}"


def _pair(here: Counter[str], there: Counter[str]) -> tuple[str, str]:
    return _counts(here) or "none", _counts(there) or "none"


def _total(counts: Iterable[tuple[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for how, calls in counts:
        total[how] += calls
    return total


def _counts(calls: Counter[str]) -> str:
    return ", ".join(f"{how} x {n}" for how, n in calls.items())


def _rules(here: Counter[_Call], there: Counter[_Call]) -> str:
    mine, theirs = (", ".join(dict.fromkeys(rule or NO_RULE for *_, rule in c)) for c in (here, there))
    return mine if mine == theirs or not theirs else f"{mine} -> {theirs}" if mine else theirs
