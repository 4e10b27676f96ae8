"""Reading TOML files with errors that name file and line, and writing their strings.

The files of amp-core are simple enough to write without a TOML package. Strings are quoted as JSON, whose
escapes are valid TOML; of the characters that TOML wants escaped, JSON leaves only DEL as it is.
"""

from __future__ import annotations

import json
import re
import sys
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

from amp_core.errors import PolicyError

_DOTTED = re.compile(r"\s*[\w-]+(\s*\.\s*[\w-]+)+(?=\s*=)")


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
        """Return ``file:line`` of the line that sets `key` in `table`, quoted or not, or opens its table."""
        wanted, here = _bare(f"{table}.{key}"), ""
        for number, line in enumerate(self.text.split("\n"), 1):
            is_head = line.lstrip().startswith("[")
            found = _bare(line.partition("#")[0]) if is_head else _bare(f"{here}.{line.partition('=')[0]}")
            if found == wanted or (is_head and found.startswith(f"{wanted}.")):
                return f"{self.name}:{number}"
            here = found if is_head else here
        return f"{self.name}:1"

    def dotted_key(self, table: str) -> tuple[str, str]:
        """Return the first key with dots but without quotes in `table`, and its ``file:line``; or empty."""
        here = ""
        for number, line in enumerate(self.text.split("\n"), 1):
            if line.lstrip().startswith("["):
                here = _bare(line.partition("#")[0])
            elif here.partition(".")[0] == table and (match := _DOTTED.match(line)):
                return _bare(match[0]), f"{self.name}:{number}"
        return "", ""


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


def _bare(path: str) -> str:
    """Return a dotted path without quotes, brackets and spaces around its parts."""
    return re.sub(r"[\s\"'\[\]]+", "", path).lstrip(".")
