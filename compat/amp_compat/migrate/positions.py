"""Where the places that findings name are after the file was rewritten."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from difflib import SequenceMatcher

from amp_compat.migrate.model import Finding


def moved(findings: Iterable[Finding], before: str, after: str) -> list[Finding]:
    """Return the findings in `before` with their lines and columns in `after`."""
    old, new = before.split("\n"), after.split("\n")
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    found = []
    for finding in findings:
        line = min(finding.line, len(old)) - 1  # a parser may miss something after the end
        start, end, first, stop = next(b[1:] for b in blocks if b[1] <= line < b[2])
        at = first + line - start if stop - first == end - start else _nearest(old[line], new, first, stop)
        found.append(replace(finding, line=at + 1, column=_column(finding.column, old[line], new[at])))
    return found


def _nearest(line: str, new: list[str], first: int, stop: int) -> int:
    """Return the number of the line that `line` most likely became, of those that replace its block."""
    candidates = range(first, stop) or [min(first, len(new) - 1)]
    return max(candidates, key=lambda at: SequenceMatcher(None, line, new[at], autojunk=False).ratio())


def _column(column: int, old: str, new: str) -> int:
    for match in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        if column < match.a + match.size:
            return match.b + max(0, column - match.a)
    return min(column, len(new))
