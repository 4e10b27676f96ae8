"""Migrate Jupyter notebooks: join the code cells, rewrite them together, and split them again."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import libcst as cst

from amp_compat.migrate.model import CELL_MARK, Finding, Rewritten
from amp_compat.migrate.names import Target
from amp_compat.migrate.positions import moved
from amp_compat.migrate.prune import names_bound_to
from amp_compat.migrate.source import migrate_source
from amp_compat.migrate.tree import syntax_error

_MAGIC = re.compile(r"^(\s*)([%!?].*|[\w., ]+=\s*[%!].*|[\w.]+\?\??\s*)$")
_TIMED = re.compile(r"^[^#%]*%%?(?:time|timeit|prun|memit|mprun|lprun)\b(.*)", re.MULTILINE)
_SOURCE = re.compile(r'(?<!\\)"source"\s*:\s*')
_HIDDEN = re.compile(r"^(\s*)pass  # amp-core magic (.*)$")
_PYTHON_MAGICS = ("%%time", "%%timeit", "%%capture", "%%debug", "%%prun", "%%memit", "%%mprun", "%%lprun")
_FILES = ("%%writefile", "%%file")
_PATH = r"torch\.(?:cuda|cpu)(?:\.amp\b|\s+import\b.*\bamp\b)|\bapex\b.*\bamp\b"


@dataclass
class _Cell:
    index: int
    number: int
    text: str


def migrate_notebook(text: str, target: Target, exported: Collection[str] = ()) -> Rewritten:
    """Rewrite the code cells of the notebook `text`; keep outputs, metadata and layout.

    Raises:
        ValueError: `text` is not a notebook.
    """
    notebook = json.loads(text)
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise ValueError("not a notebook of nbformat 4: it has no list of cells")
    cells, skipped = _code_cells(notebook["cells"])
    kept = {*exported, *(word for cell in cells for word in _words_in_magics(cell.text))}
    result = migrate_source("".join(_block(cell) for cell in cells), target, kept)
    new = _split(result.text)
    changed = False
    for cell in cells:
        if new[cell.number] != cell.text:
            changed = True
            _store(notebook["cells"][cell.index], new[cell.number])
    findings = _relocate(result.findings, cells) + skipped + [f for cell in cells for f in _in_magics(cell)]
    findings.sort(key=lambda f: (f.cell or 0, f.line, f.column))
    return Rewritten(_dump(notebook, text) if changed else text, findings)


def moved_in_notebook(findings: list[Finding], before: str, after: str) -> list[Finding]:
    """Return the findings in the notebook `before` with their lines and columns in `after`."""
    old, new = (list(_code_texts(json.loads(text)["cells"]).values()) for text in (before, after))
    found: list[Finding] = []
    for number in sorted({finding.cell for finding in findings if finding.cell}):
        here = [finding for finding in findings if finding.cell == number]
        found += moved(here, old[number - 1], new[number - 1])
    return found


def _code_texts(raw: list[dict[str, Any]]) -> dict[int, str]:
    return {index: _text(cell) for index, cell in enumerate(raw) if cell.get("cell_type") == "code"}


def _code_cells(raw: list[dict[str, Any]]) -> tuple[list[_Cell], list[Finding]]:
    cells: list[_Cell] = []
    skipped: list[Finding] = []
    texts = _code_texts(raw)
    names = names_bound_to("\n".join(texts.values()))
    deprecated = re.compile(rf"\b(?:{'|'.join(['amp|autocast|GradScaler|custom_[fb]wd', *names])})\b")
    for number, (index, text) in enumerate(texts.items(), start=1):
        if text.lstrip().startswith("%%") and not text.lstrip().startswith(_PYTHON_MAGICS):
            skipped += _in_other_cell(text, number, names)
            continue
        try:
            cst.parse_module(_hide_magics(text))
        except cst.ParserSyntaxError as error:
            if deprecated.search(text):
                reason = f"the cell is not valid Python: {error.message}"
                skipped.append(Finding(error.raw_line, error.raw_column, "manual", "", reason, number))
            continue
        cells.append(_Cell(index, number, text))
    return cells, skipped


def _in_other_cell(text: str, number: int, names: Collection[str]) -> list[Finding]:
    """Return a finding if a cell that begins with an unsupported magic has a deprecated name."""
    magic, *_ = text.split(maxsplit=1)
    # A file has its own imports. The word amp alone is most often an option of a command.
    words = [] if magic in _FILES else ["autocast", "GradScaler", "custom_[fb]wd", *names]
    for row, line in enumerate(text.splitlines(), start=1):
        found = re.search("|".join([_PATH, *(rf"\b{word}\b" for word in words if word != "amp")]), line)
        if found is not None:
            reason = f"cells with {magic} are not rewritten; change it by hand"
            return [Finding(row, found.start(), "manual", found[0], reason, number)]
    return []


def _text(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    return "".join(source) if isinstance(source, list) else str(source)


def _words_in_magics(text: str) -> list[str]:
    """Return the words of statements that magics run, which are not rewritten."""
    return re.findall(r"\w+", " ".join(_TIMED.findall(text)))


def _in_magics(cell: _Cell) -> list[Finding]:
    """Return a finding for each deprecated name in them."""
    reason = "statements of magics are not rewritten; change it by hand"
    found: list[Finding] = []
    for magic in _TIMED.finditer(cell.text):
        for name in re.finditer(r"\btorch\.(?:cuda|cpu)\.amp\b", magic[1]):
            before = cell.text[: magic.start(1) + name.start()]
            line, column = before.count("\n") + 1, len(before) - before.rfind("\n") - 1
            found.append(Finding(line, column, "manual", name[0], reason, cell.number))
    return found


def _block(cell: _Cell) -> str:
    return f"{CELL_MARK}{cell.number}\n{_hide_magics(cell.text)}\n"


def _hide_magics(text: str) -> str:
    """Turn IPython lines into valid Python statements."""
    lines = text.split("\n")
    # A line of an expression may begin with %.
    if not any(map(_MAGIC.match, lines)) or syntax_error(text) is None:
        return text
    continued = False
    for position, line in enumerate(lines):
        match = _MAGIC.match(line)
        if match or continued:
            indent, rest = match.groups() if match else ("", line)
            lines[position] = f"{indent}pass  # amp-core magic {rest}"
            continued = line.rstrip("\r").endswith("\\")
    return "\n".join(lines)


def _split(text: str) -> dict[int, str]:
    cells: dict[int, list[str]] = {}
    current: list[str] = []
    for line in text.split("\n"):
        if line.startswith(CELL_MARK):
            current = cells.setdefault(int(line[len(CELL_MARK) :]), [])
        else:
            current.append(_HIDDEN.sub(r"\1\2", line))
    last = max(cells, default=0)
    # Each block ends with an added line break, so the last one has an extra empty line.
    return {number: "\n".join(lines[:-1] if number == last else lines) for number, lines in cells.items()}


def _store(cell: dict[str, Any], text: str) -> None:
    cell["source"] = text.splitlines(keepends=True) if isinstance(cell.get("source"), list) else text


def _relocate(findings: list[Finding], cells: list[_Cell]) -> list[Finding]:
    """Set the cell of each finding and its line within the cell."""
    starts: list[tuple[int, int]] = []
    line = 1
    for cell in cells:
        starts.append((line, cell.number))
        line += cell.text.count("\n") + 2
    relocated: list[Finding] = []
    for finding in findings:
        start, number = max(entry for entry in starts if entry[0] <= finding.line)
        relocated.append(replace(finding, line=finding.line - start, cell=number))
    return relocated


def _dump(notebook: dict[str, Any], original: str) -> str:
    """Return `original` with the sources of the cells of `notebook`; all else stays as it was written."""
    sources = [cell.get("source") for cell in json.loads(original)["cells"]]
    text, start, end = "", 0, 0
    for before, cell in zip(sources, notebook["cells"], strict=True):
        for match in _SOURCE.finditer(original, start):
            value, after = json.JSONDecoder().raw_decode(original, match.end())
            if value == before:
                if value != cell["source"]:
                    text += original[end : match.end()] + _json(cell["source"], original[match.end() : after])
                    end = after
                start = after
                break
    text += original[end:]
    if json.dumps(json.loads(text)) != json.dumps(notebook):  # as text, where NaN equals itself
        raise ValueError("left unchanged: the places of its cells in the file are unclear")
    return text


def _json(source: list[str] | str, before: str) -> str:
    """Write `source` in the layout of `before`, the text that it replaces."""
    if isinstance(source, str):
        return json.dumps(source, ensure_ascii=before.isascii())
    opening, *_ = before.split('"', 1)
    gap = opening.partition("[")[2] or " " * ('", "' in before)
    lines = f",{gap}".join(json.dumps(line, ensure_ascii=before.isascii()) for line in source)
    return opening + lines + before[before.rindex('"') + 1 :]
