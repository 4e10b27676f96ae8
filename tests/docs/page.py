"""Run the python blocks of one Markdown page, in order, in one namespace.

``python page.py PAGE`` runs a page in its own process.
"""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

from sybil import Document, Region
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

_PYTHON = FencedCodeBlockLexer(r"python\b[^\n]*")
_FRONT = re.compile(r"\A---\n((?:.*\n)*?)---\n")


def blocks(path: Path) -> list[Region]:
    """Return the fenced blocks whose language is ``python``, whatever options follow the word."""
    document = Document(path.read_text(encoding="utf-8"), str(path))
    return list(_PYTHON(document))


def needs_own_process(path: Path) -> bool:
    """Whether the page's front matter says ``own_process: true`` (it renames a device, forks ...)."""
    return _front(path).get("own_process") == "true"


def packages(path: Path) -> list[str]:
    """Return what the page's front matter says under ``needs:``, packages that are no part of amp-core."""
    return _front(path).get("needs", "").split()


def _front(path: Path) -> dict[str, str]:
    found = _FRONT.match(path.read_text(encoding="utf-8"))
    lines = found[1].splitlines() if found else []
    return dict(line.split(": ", 1) for line in lines)


def run(path: Path) -> None:
    """Execute the page. Tracebacks show its own lines, and its classes can be pickled."""
    text = path.read_text(encoding="utf-8")
    module = types.ModuleType(f"page_{path.stem.replace('-', '_')}")
    sys.modules[module.__name__] = module
    try:
        for block in blocks(path):
            first = text.count("\n", 0, block.start) + 1
            source = "\n" * first + str(block.lexemes["source"])
            exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    finally:
        del sys.modules[module.__name__]


if __name__ == "__main__":
    run(Path(sys.argv[1]).resolve())
