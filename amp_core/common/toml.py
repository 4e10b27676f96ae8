"""Reading TOML files with errors that name file and line, and writing their strings.

The files of amp-core are simple enough to write without a TOML package. Strings are quoted as JSON, whose
escapes are valid TOML; of the characters that TOML wants escaped, JSON leaves only DEL as it is.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

from amp_core.errors import PolicyError

_DOTTED = re.compile(r"\s*[\w-]+(\s*\.\s*[\w-]+)+(?=\s*=)")
_HEAD = re.compile(r"\s*\[\[?")
_PART = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([\w-]+))\s*""")


def quoted(text: str) -> str:
    """Return `text` as a TOML string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class Document(NamedTuple):
    """The text of a TOML file, or TOML itself, and its name in errors."""

    text: str
    name: str

    def parse(self, keys: tuple[str, ...]) -> dict[str, Any]:
        """Return the data in it.

        Raises:
            PolicyError: it is not TOML, or has another top-level key than `keys`.
        """
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

        try:
            data: dict[str, Any] = tomllib.loads(self.text)
        except tomllib.TOMLDecodeError as error:
            raise PolicyError(f"{self.name}: not TOML: {error}") from error
        for key in data:
            if key not in keys:
                raise PolicyError(f"{self.place(key)}: unknown key {key!r}; the keys are {', '.join(keys)}.")
        return data

    def place(self, key: str, table: str = "") -> str:
        """Return ``file:line`` of the line that sets `key` in `table`, quoted or not, or opens its table.

        Where there is none, as in an inline table, it is that of `table`.
        """
        wanted = f"{table}.{key}" if table else key
        number = _lines(self.text).get(wanted)
        if number is not None:
            return f"{self.name}:{number}"
        outer, _, inner = table.rpartition(".")
        return self.place(inner, outer) if table else f"{self.name}:1"

    def dotted_key(self, table: str) -> tuple[str, str]:
        """Return the first key with dots but without quotes in `table`, and its ``file:line``; or empty."""
        lines = self.text.split("\n")
        for number, path in _paths(self.text):
            key = _DOTTED.match(lines[number - 1])
            if key and path[0] == table and len(path) > key[0].count(".") + 1:
                return re.sub(r"\s", "", key[0]), f"{self.name}:{number}"
        return "", ""


@functools.lru_cache(maxsize=1)  # a file asks for the place of each of its entries
def _lines(text: str) -> dict[str, int]:
    """Return the number of the first line that sets each key, or opens its table, by its name in full."""
    lines: dict[str, int] = {}
    for number, path in _paths(text):
        for end in range(1, len(path) + 1):
            lines.setdefault(".".join(path[:end]), number)
    return lines


def _paths(text: str) -> list[tuple[int, list[str]]]:
    """Return the number of each line that opens a table or sets a key, and the names of all tables to it."""
    paths: list[tuple[int, list[str]]] = []
    table: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        head = _HEAD.match(line)
        path, end = _path(line, head.end() if head else 0)
        if head and end == "]":
            table = path
            paths.append((number, table))
        elif path and end == "=":
            paths.append((number, [*table, *path]))
    return paths


def _path(line: str, start: int) -> tuple[list[str], str]:
    """Return the parts of the dotted name at `start` of a line, and the character after it."""
    path: list[str] = []
    while part := _PART.match(line, start):
        basic, literal, bare = part.groups()
        path.append(literal if bare is None and basic is None else bare or _unescaped(basic))
        start = part.end() + 1
        if line[start - 1 : start] != ".":
            break
    return path, line[start - 1 : start] if path else ""


def _unescaped(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:  # an escape that JSON lacks
        return text


def load(source: str | PathLike[str]) -> Document:
    """Read `source`, a path or the text itself.

    Raises:
        OSError: the file cannot be read.
        PolicyError: it is not UTF-8.
        TypeError: it is neither.
    """
    if isinstance(source, str) and ("\n" in source or not source):
        return Document(source, "<toml>")
    if not isinstance(source, (str, PathLike)):
        raise TypeError(f"TOML is read from a path or a string of it, not from {type(source).__name__}.")
    path = fspath(source)
    try:
        return Document(Path(path).read_text(encoding="utf-8-sig"), path)
    except UnicodeDecodeError as error:
        line = Path(path).read_bytes()[: error.start].count(b"\n") + 1
        raise PolicyError(
            f"{path}:{line}: not UTF-8, which TOML must be: {error}. Save the file as UTF-8."
        ) from error
