"""Reading TOML files with errors that name file and line, and writing their strings.

The files of amp-core are simple enough to write without a TOML package. Strings are quoted as JSON, whose
escapes are valid TOML.
"""

from __future__ import annotations

import json
import re
import sys
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from amp_core.errors import PolicyError


def quoted(text: str) -> str:
    """Return `text` as a TOML string."""
    return json.dumps(text, ensure_ascii=False)


def load(source: str | PathLike[str]) -> tuple[str, str]:
    """Return the text of `source`, a path or the text itself, and how errors refer to it.

    Raises:
        OSError: the file cannot be read.
        PolicyError: it is not UTF-8.
    """
    if isinstance(source, str) and ("\n" in source or not source):
        return source, "<toml>"
    path = fspath(source)
    try:
        return Path(path).read_text(encoding="utf-8-sig"), path
    except UnicodeDecodeError as error:
        line = Path(path).read_bytes()[: error.start].count(b"\n") + 1
        raise PolicyError(
            f"{path}:{line}: not UTF-8, which TOML must be: {error}. Save the file as UTF-8."
        ) from error


def parse(text: str, where: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the data in `text`.

    Raises:
        PolicyError: `text` is not TOML, or has another top-level key than `keys`.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

    try:
        data: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{where}: not TOML: {error}") from error
    for key in data:
        if key not in keys:
            line = line_of(text, key)
            raise PolicyError(f"{where}:{line}: unknown key {key!r}; the keys are {', '.join(keys)}.")
    return data


def line_of(text: str, key: str, table: str = "") -> int:
    """Return the number of the line that sets `key` in `table`, quoted or not, or opens its table; else 1."""
    wanted, here = _bare(f"{table}.{key}"), ""
    for number, line in enumerate(text.splitlines(), 1):
        is_head = line.lstrip().startswith("[")
        found = _bare(line.partition("#")[0]) if is_head else _bare(f"{here}.{line.partition('=')[0]}")
        if found == wanted or (is_head and found.startswith(f"{wanted}.")):
            return number
        here = found if is_head else here
    return 1


def _bare(path: str) -> str:
    """Return a dotted path without quotes, brackets and spaces around its parts."""
    return re.sub(r"[\s\"'\[\]]+", "", path).lstrip(".")
