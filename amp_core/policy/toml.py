"""Policies as TOML files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from typing_extensions import Self

from amp_core.common import toml
from amp_core.errors import BackendNotFoundError, PolicyError
from amp_core.policy import recipes
from amp_core.policy.changes import check_device_type, resolve_of_module
from amp_core.policy.rules import FP32

if TYPE_CHECKING:
    from amp_core.formats import Recipe


class Policy(Protocol):
    """The part of `amp_core.OpPolicy` that reading and writing need."""

    device_type: str

    @classmethod
    def default(cls, device_type: str) -> Self:
        """Return the default policy of a device type."""

    @classmethod
    def uniform(cls, device_type: str) -> Self:
        """Return the policy that treats each op alike on every device."""

    def override(self, changes: Mapping[Any, str | Recipe], *, origin: str | None = None) -> Self:
        """Return a copy with different rules for some ops."""

    def diff(self, other: Any) -> Mapping[str, tuple[str, str]]:
        """Return the ops whose rules differ."""


P = TypeVar("P", bound=Policy)

# Only `amp_core.Advice` uses init_scale, and only `amp_core.PrecisionPlan` distributed.
_KEYS = ("device_type", "base", "init_scale", "rules", "modules", "recipes", "distributed")
_TABLES = {"rules": ", of op = rule", "modules": ", of glob = rules", "distributed": ""}
_BASES = ("default", "uniform", "float32", "none")

ModuleRules = Mapping[str, "Mapping[str, str] | str"]
"""Maps globs over module names to op rules or ``"fp32"``; see `amp_core.apply_policy`."""


def write(policy: Policy, modules: ModuleRules = MappingProxyType({})) -> str:
    """Return `policy` as TOML: its differences from the device's default policy, named as the base.

    That of a device that is not installed begins with ``uniform``.
    """
    base, start = _start(policy)
    lines = [f'device_type = "{policy.device_type}"', f'base = "{base}"', "", "[rules]"]
    changes = start.diff(policy)
    lines += [f"{toml.quoted(op)} = {toml.quoted(rule)}" for op, (_, rule) in changes.items()]
    rules = [rule for _, rule in changes.values()]
    return "\n".join(lines) + "\n" + ("\n" if modules else "") + write_modules(modules, rules)


def _start(policy: P) -> tuple[str, P]:
    try:
        return "default", type(policy).default(policy.device_type)
    except BackendNotFoundError:
        return "uniform", type(policy).uniform(policy.device_type)


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


def parsed(source: str | PathLike[str]) -> tuple[dict[str, Any], toml.Document]:
    """Return the data in `source`, a path or the TOML text itself, and what names the places of its entries.

    Raises:
        PolicyError: `source` is not TOML, has an unknown key, or a value that is no table where one belongs.
        OSError: the file cannot be read.
    """
    file = toml.load(source)
    data = file.parse(_KEYS)
    for table, entries in _TABLES.items():
        if not isinstance(data.get(table, {}), dict):
            raise PolicyError(f"{file.place(table)}: {table} must be a table, [{table}]{entries}.")
    _check_dots(file)
    data["recipes"] = recipes.from_toml(data.get("recipes", {}), file)
    return data, file


def _check_dots(file: toml.Document) -> None:
    """Raise PolicyError where TOML takes a name for tables and the rule of it for that of something else."""
    for table in ("rules", "modules"):
        name, place = file.dotted_key(table)
        if name:
            first, _, last = name.rpartition(".")
            meant = f"; or if {last!r} is an op, {toml.quoted(first)} = {{ {last} = ... }}"
            raise PolicyError(
                f"{place}: TOML reads {first!r} as a table. Put a name with dots in quotes: "
                f"{toml.quoted(name)} = ...{meant if table == 'modules' else ''}"
            )


def modules_of(data: Mapping[str, Any], file: toml.Document) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the module rules of what `parsed` returned, and the position of each glob as ``file:line``.

    Raises:
        PolicyError: a glob has neither ``"fp32"`` nor op rules.
    """
    rules: dict[str, Any] = {}
    places = {glob: file.place(glob, "modules") for glob in data.get("modules", {})}
    for glob, place in places.items():
        what = rules[glob] = data["modules"][glob]
        if isinstance(what, dict):
            _check_flat(glob, what, place)
            rules[glob] = {op: _rule(rule, data["recipes"], place) for op, rule in what.items()}
        elif what != FP32:
            raise PolicyError(
                f"{place}: {glob!r}: {what!r} is not a rule for a module; use {FP32!r} or op rules."
            )
    return rules, places


def _check_flat(glob: str, what: dict[str, Any], place: str) -> None:
    for op, rule in what.items():
        if isinstance(rule, dict):
            names = f"{glob}.{op}", _path_of(op, rule)
            raise PolicyError(
                f"{place}: TOML reads {op!r} in {glob!r} as a table. Put a name with dots in quotes, the "
                f"module's or the op's: {' or '.join(map(toml.quoted, names))}."
            )


def checked_modules(data: Mapping[str, Any], file: toml.Document) -> dict[str, Any]:
    """Return the module rules of what `parsed` returned, of ops and rules that are known.

    Raises:
        PolicyError: as for `modules_of`; or an op or rule is unknown, or the rule cannot apply to the op.
    """
    rules, places = modules_of(data, file)
    for glob, what in rules.items():
        try:
            resolve_of_module(glob, what)
        except PolicyError as error:
            raise PolicyError(f"{places[glob]}: {error}") from error
    return rules


def policy_of(kind: type[P], data: Mapping[str, Any], file: toml.Document, device_type: str | None) -> P:
    """Return the policy of class `kind` in what `parsed` returned.

    Raises:
        PolicyError: it names no device type, another than `device_type`, or unknown ops or rules.
    """
    named = data.get("device_type", device_type)
    if named is None:
        raise PolicyError(f'{file.name}: names no device; add device_type = "cuda", or pass it in Python.')
    try:
        check_device_type(named)
    except PolicyError as error:
        if "device_type" not in data:
            raise
        raise PolicyError(f"{file.place('device_type')}: {error}") from None
    if device_type is not None and named != device_type:
        raise PolicyError(f"{file.name}: is for {named!r}, not for {device_type!r}.")
    return _override(_base(kind, data.get("base", "default"), named, file), data, file)


def read_changes(path: str, policy: P) -> P:
    """Apply the file at `path` to `policy`; return it unchanged if the file is for another device.

    A file that names a base replaces the policy; any other file overrides some of its rules.
    """
    data, file = parsed(Path(path))
    if data.get("device_type", policy.device_type) != policy.device_type:
        return policy
    if "base" in data:
        policy = _base(type(policy), data["base"], policy.device_type, file)
    return _override(policy, data, file)


def _rule(rule: Any, own: Mapping[str, Recipe], where: str) -> Any:
    try:
        return recipes.as_rule(rule, own)
    except PolicyError as error:
        raise PolicyError(f"{where}: {error}") from error


def _base(kind: type[P], name: object, device_type: str, file: toml.Document) -> P:
    if name not in _BASES:
        raise PolicyError(f"{file.place('base')}: unknown base {name!r}; the bases are {', '.join(_BASES)}.")
    make: Any = kind
    try:
        policy: P = make(device_type) if name == "none" else getattr(make, str(name))(device_type)
    except BackendNotFoundError as error:
        place = file.place("device_type")
        raise PolicyError(
            f'{place}: {error} Or name a base that needs no backend: base = "uniform".'
        ) from None
    return policy


def _override(policy: P, data: Mapping[str, Any], file: toml.Document) -> P:
    for op, rule in data.get("rules", {}).items():
        place = file.place(op, "rules")
        if isinstance(rule, dict):
            name = _path_of(op, rule)
            raise PolicyError(
                f"{file.place(name, 'rules')}: TOML reads {op!r} as a table. Put a name with dots in quotes: "
                f"{toml.quoted(name)} = ..."
            )
        try:
            known = recipes.as_rule(rule, data["recipes"])
            policy = policy.override({op: known}, origin=place)
        except PolicyError as error:
            raise PolicyError(f"{place}: {error}") from error
    return policy


def _path_of(name: str, value: Any) -> str:
    """Return the dotted name of the first value in the tables below `name`."""
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    return name
