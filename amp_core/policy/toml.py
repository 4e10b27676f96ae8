"""Policies as TOML files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from typing_extensions import Self

from amp_core.common import toml
from amp_core.errors import PolicyError
from amp_core.policy import recipes
from amp_core.policy.rules import FP32

if TYPE_CHECKING:
    from amp_core.formats import Recipe


class Policy(Protocol):
    """The part of `amp_core.OpPolicy` that reading and writing need."""

    device_type: str

    def override(self, changes: Mapping[Any, str | Recipe], *, origin: str | None = None) -> Self:
        """Return a copy with different rules for some ops."""

    def diff(self, other: Any) -> Mapping[str, tuple[str, str]]:
        """Return the ops whose rules differ."""


P = TypeVar("P", bound=Policy)

_KEYS = (
    "device_type",
    "base",
    "init_scale",
    "rules",
    "modules",
    "recipes",
    "distributed",
)  # only `amp_core.Advice` uses init_scale, and `amp_core.PrecisionPlan` distributed
_BASES = ("default", "uniform", "float32", "none")


ModuleRules = Mapping[str, "Mapping[str, str] | str"]
"""Maps globs over module names to op rules or ``"fp32"``; see `amp_core.apply_policy`."""


def write(policy: Policy, modules: ModuleRules = MappingProxyType({})) -> str:
    """Return `policy` as TOML: its differences from the device's default policy, named as the base."""
    lines = [f'device_type = "{policy.device_type}"', 'base = "default"', "", "[rules]"]
    changes = _base(type(policy), "default", policy.device_type).diff(policy)
    lines += [f'"{op}" = "{rule}"' for op, (_, rule) in changes.items()]
    rules = [rule for _, rule in changes.values()]
    return "\n".join(lines) + "\n" + ("\n" if modules else "") + write_modules(modules, rules)


def write_modules(modules: ModuleRules, others: Iterable[str] = ()) -> str:
    """Return module rules as TOML, in the table ``modules``, with the recipes of those and of `others`."""
    lines = ["[modules]"] if modules else []
    used = [*others]
    for glob, what in modules.items():  # in order: later globs take precedence
        if isinstance(what, str):
            lines.append(f"{toml.quoted(glob)} = {toml.quoted(what)}")
        else:
            rules = ", ".join(f"{toml.quoted(op)} = {toml.quoted(rule)}" for op, rule in what.items())
            lines.append(f"{toml.quoted(glob)} = {{ {rules} }}")
            used += what.values()
    return "".join(f"{line}\n" for line in lines) + recipes.to_toml(used)


def read_modules(source: str | PathLike[str], required: bool = True) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the module rules in `source`, and the position of each glob as ``file:line``.

    Raises:
        PolicyError: `source` is not TOML, has no ``modules`` table although it is `required`, or a glob has
            neither ``"fp32"`` nor op rules.
    """
    text, where = toml.load(source)
    data = _parse(text, where)
    rules = data.get("modules", {})
    if not rules and required:
        raise PolicyError(f"{where}: has no rules for modules; add them in a table [modules].")
    places = {glob: f"{where}:{toml.line_of(text, glob, 'modules')}" for glob in rules}
    for glob, what in rules.items():
        if isinstance(what, dict):
            rules[glob] = {op: _rule(rule, data["recipes"], places[glob]) for op, rule in what.items()}
        elif what != FP32:
            raise PolicyError(
                f"{places[glob]}: {glob!r}: {what!r} is not a rule for a module; use {FP32!r} or op rules."
            )
    return rules, places


def read_value(source: str | PathLike[str], key: str) -> tuple[Any, str]:
    """Return the value of a top-level key in `source` (None if missing), and its place as ``file:line``."""
    text, where = toml.load(source)
    return _parse(text, where).get(key), f"{where}:{toml.line_of(text, key)}"


def read_table(source: str | PathLike[str], name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a table of `source`, empty if missing, and the place of each of its keys as ``file:line``.

    Raises:
        PolicyError: `source` is not TOML, or the entry is not a table.
    """
    text, where = toml.load(source)
    table = _parse(text, where).get(name, {})
    if not isinstance(table, dict):
        raise PolicyError(f"{where}:{toml.line_of(text, name)}: {name} must be a table, [{name}].")
    return table, {key: f"{where}:{toml.line_of(text, key, name)}" for key in table}


def read(kind: type[P], source: str | PathLike[str], device_type: str | None) -> P:
    """Read a policy of class `kind` from `source`, a path or the TOML text itself."""
    text, where = toml.load(source)
    data = _parse(text, where)
    named = data.get("device_type", device_type)
    if named is None:
        raise PolicyError(f'{where}: names no device; add device_type = "cuda", or pass device_type=.')
    if not (isinstance(named, str) and named.isidentifier()):
        line = toml.line_of(text, "device_type")
        raise PolicyError(
            f'{where}:{line}: {named!r} is no device type. Use a name such as "cuda", without an index.'
        )
    if device_type is not None and named != device_type:
        raise PolicyError(f"{where}: is for {named!r}, not for {device_type!r}.")
    return _override(_base(kind, data.get("base", "default"), named, text, where), data, text, where)


def read_changes(path: str, policy: P) -> P:
    """Apply the file at `path` to `policy`; return it unchanged if the file is for another device.

    A file that names a base replaces the policy; any other file overrides some of its rules.
    """
    text, where = toml.load(Path(path))
    data = _parse(text, where)
    if data.get("device_type", policy.device_type) != policy.device_type:
        return policy
    if "base" in data:
        policy = _base(type(policy), data["base"], policy.device_type, text, where)
    return _override(policy, data, text, where)


def _parse(text: str, where: str) -> dict[str, Any]:
    data = toml.parse(text, where, _KEYS)
    if not isinstance(data.get("rules", {}), dict):
        raise PolicyError(
            f"{where}:{toml.line_of(text, 'rules')}: rules must be a table, [rules], of op = rule."
        )
    if not isinstance(data.get("modules", {}), dict):
        raise PolicyError(
            f"{where}:{toml.line_of(text, 'modules')}: modules must be a table, [modules], of glob = rules."
        )
    data["recipes"] = recipes.from_toml(data.get("recipes", {}), text, where)
    return data


def _rule(rule: Any, own: Mapping[str, Recipe], where: str) -> Any:
    try:
        return recipes.as_rule(rule, own)
    except PolicyError as error:
        raise PolicyError(f"{where}: {error}") from error


def _base(kind: type[P], name: object, device_type: str, text: str = "", where: str = "") -> P:
    if name not in _BASES:
        line = toml.line_of(text, "base")
        raise PolicyError(f"{where}:{line}: unknown base {name!r}; the bases are {', '.join(_BASES)}.")
    make: Any = kind
    policy: P = make(device_type) if name == "none" else getattr(make, str(name))(device_type)
    return policy


def _override(policy: P, data: dict[str, Any], text: str, where: str) -> P:
    for op, rule in data.get("rules", {}).items():
        line = toml.line_of(text, op, "rules")
        try:
            known = recipes.as_rule(rule, data["recipes"])
            policy = policy.override({op: known}, origin=f"{where}:{line}")
        except PolicyError as error:
            raise PolicyError(f"{where}:{line}: {error}") from error
    return policy
