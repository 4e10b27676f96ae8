"""Where the places that findings name are after the file was rewritten."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from difflib import SequenceMatcher

from amp_compat.migrate.model import Finding

_REACH = 10


def moved(findings: Iterable[Finding], before: str, after: str) -> list[Finding]:
    """Return the findings in `before` with their lines and columns in `after`."""
    old, new = before.split("\n"), after.split("\n")
    blocks = SequenceMatcher(None, old, new).get_opcodes()
    found = []
    for finding in findings:
        line = min(finding.line, len(old)) - 1  # a parser may miss something after the end
        start, end, first, stop = next(b[1:] for b in blocks if b[1] <= line < b[2])
        at = first + line - start
        if stop - first != end - start:
            at = _nearest(old[line], new, range(first, stop), at)
        found.append(replace(finding, line=at + 1, column=_column(finding.column, old[line], new[at])))
    return found


def _nearest(line: str, new: list[str], block: range, near: int) -> int:
    """Return the number of the line, of those about `near` that replace a block, that `line` became."""
    near = min(max(near, block.start), max(block.start, block.stop - 1), len(new) - 1)
    about = range(max(block.start, near - _REACH), min(block.stop, near + _REACH + 1)) or [near]
    return max(about, key=lambda at: (SequenceMatcher(None, line, new[at]).ratio(), -abs(at - near)))


def _column(column: int, old: str, new: str) -> int:
    end = 0
    for match in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        if column < match.a:
            return end  # what was replaced begins where the text before it ends
        if column < match.a + match.size:
            return match.b + column - match.a
        end = match.b + match.size
    return end
