"""Policies as TOML files.

Written by hand: the format is two keys and two tables, and needs no package to write. Strings are quoted by
JSON, whose escapes TOML has too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Protocol, TypeVar

from typing_extensions import Self

from amp_core.errors import PolicyError


class Policy(Protocol):
    """What is read and written: `amp_core.OpPolicy`."""

    device_type: str

    def override(self, changes: Mapping[Any, str], *, origin: str | None = None) -> Self:
        """Return the policy with other rules for some ops."""

    def diff(self, other: Any) -> Mapping[str, tuple[str, str]]:
        """Return the ops whose rule differs."""


P = TypeVar("P", bound=Policy)

_KEYS = ("device_type", "base", "init_scale", "rules", "modules")  # init_scale: for `amp_core.Advice` alone
_BASES = ("default", "uniform", "float32", "none")


def write(policy: Policy) -> str:
    """Return `policy` as TOML: its difference from the device's default, which is named as the base."""
    lines = [f'device_type = "{policy.device_type}"', 'base = "default"', "", "[rules]"]
    for op, (_, rule) in _base(type(policy), "default", policy.device_type).diff(policy).items():
        lines.append(f'"{op}" = "{rule}"')
    return "\n".join(lines) + "\n"


ModuleRules = Mapping[str, "Mapping[str, str] | str"]
"""Glob over module names to op rules, or to ``"fp32"``; see `amp_core.apply_policy`."""


def write_modules(rules: ModuleRules) -> str:
    """Return the rules of modules as TOML: the table ``modules``."""
    whole = [f"{_quoted(g)} = {_quoted(what)}" for g, what in rules.items() if isinstance(what, str)]
    lines = ["[modules]", *whole] if whole else []
    for glob, what in rules.items():  # after the others: keys belong to the last table that was named
        if not isinstance(what, str):
            lines.append(f"[modules.{_quoted(glob)}]")
            lines += [f"{_quoted(op)} = {_quoted(rule)}" for op, rule in what.items()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def read_modules(source: str | PathLike[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the rules of modules in `source`, and where each glob stands, as ``file:line``.

    Raises:
        PolicyError: it is not TOML, or has no table ``modules``.
    """
    text, where = _load(source)
    found = _parse(text, where).get("modules")
    if not found:
        raise PolicyError(f"{where}: has no rules for modules; they stand in the table [modules].")
    return found, {glob: f"{where}:{_line(text, glob, 'modules')}" for glob in found}


def read_value(source: str | PathLike[str], key: str) -> tuple[Any, str]:
    """Return what `source` says under one key of the file, None for nothing, and where, as ``file:line``."""
    text, where = _load(source)
    return _parse(text, where).get(key), f"{where}:{_line(text, key)}"


def read(kind: type[P], source: str | PathLike[str], device_type: str | None) -> P:
    """Return the policy, of class `kind`, that `source` (a path, or the text itself) describes."""
    text, where = _load(source)
    data = _parse(text, where)
    named = data.get("device_type", device_type)
    if named is None:
        raise PolicyError(f'{where}: names no device; add device_type = "cuda", or pass device_type=.')
    if device_type is not None and named != device_type:
        raise PolicyError(f"{where}: is for {named!r}, not for {device_type!r}.")
    return _override(_base(kind, data.get("base", "default"), named, text, where), data, text, where)


def read_changes(path: str, policy: P) -> P:
    """Return `policy` as the file at `path` changes it; unchanged if the file is for another device.

    A file that names a base replaces the policy, any other changes it.
    """
    text, where = _load(Path(path))
    data = _parse(text, where)
    if data.get("device_type", policy.device_type) != policy.device_type:
        return policy
    if "base" in data:
        policy = _base(type(policy), data["base"], policy.device_type, text, where)
    return _override(policy, data, text, where)


def _load(source: str | PathLike[str]) -> tuple[str, str]:
    if isinstance(source, str) and "\n" in source:
        return source, "<toml>"
    path = fspath(source)
    return Path(path).read_text(encoding="utf-8"), path


def _parse(text: str, where: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

    try:
        data: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{where}: not TOML: {error}") from error
    for key in data:
        if key not in _KEYS:
            line = _line(text, key)
            raise PolicyError(f"{where}:{line}: unknown key {key!r}; the keys are {', '.join(_KEYS)}.")
    if not isinstance(data.get("rules", {}), dict):
        raise PolicyError(f"{where}:{_line(text, 'rules')}: rules is a table, [rules], of op = rule.")
    if not isinstance(data.get("modules", {}), dict):
        raise PolicyError(
            f"{where}:{_line(text, 'modules')}: modules is a table, [modules], of glob = rules."
        )
    return data


def _base(kind: type[P], name: object, device_type: str, text: str = "", where: str = "") -> P:
    if name not in _BASES:
        line = _line(text, "base")
        raise PolicyError(f"{where}:{line}: unknown base {name!r}; the bases are {', '.join(_BASES)}.")
    make: Any = kind
    policy: P = make(device_type) if name == "none" else getattr(make, str(name))(device_type)
    return policy


def _override(policy: P, data: dict[str, Any], text: str, where: str) -> P:
    for op, rule in data.get("rules", {}).items():
        line = _line(text, op)
        try:
            policy = policy.override({op: rule}, origin=f"{where}:{line}")
        except PolicyError as error:
            raise PolicyError(f"{where}:{line}: {error}") from error
    return policy


def _line(text: str, key: str, table: str | None = None) -> int:
    """The line on which `key` is set: the first that starts with it, quoted or not, or names its table."""
    heads = {key} if table is None else {key, f'{table}."{key}"', f"{table}.{key}", f"{table}.'{key}'"}
    for number, line in enumerate(text.splitlines(), 1):
        head = line.partition("=")[0].strip().strip("[]").strip()
        if head in heads or head.strip("\"'") in heads:
            return number
    return 1
