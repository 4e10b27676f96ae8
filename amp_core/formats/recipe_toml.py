"""Recipes as TOML: top-level keys, and a table per role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from os import PathLike
from typing import Any

import torch

from amp_core.common import toml
from amp_core.common.text import dtype_name
from amp_core.errors import PolicyError
from amp_core.formats.elements import ELEMENTS
from amp_core.formats.quantization import Delayed, Quantization

ROLES = ("input", "weight", "grad_output")
_KEYS = ("name", "source", "accumulate", *ROLES)
_DELAYED = ("history", "margin", "algorithm")
_ROLE_KEYS = ("element", "granularity", "scale", "found", *_DELAYED, "rounding", "hadamard")


def write(fields: Mapping[str, Any]) -> str:
    """Return the fields of a `Recipe` as TOML, which `read` takes apart.

    Raises:
        PolicyError: a role has another element format than those of `ELEMENTS`, as files name these.
    """
    lines = [f"{key} = {toml.quoted(fields[key])}" for key in ("name", "source")]
    lines.append(f'accumulate = "{dtype_name(fields["accumulate"])}"')
    for role in ROLES:
        if fields[role] is not None:
            lines += ["", f"[{role}]", *_role_lines(fields[role])]
    return "\n".join(lines) + "\n"


def _role_lines(quantization: Quantization) -> list[str]:
    element = quantization.element
    if ELEMENTS.get(element.name) != element:
        raise PolicyError(
            f"TOML holds only the names of element formats: {', '.join(ELEMENTS)}. This recipe has another "
            f"one, {element}, so define the recipe in Python."
        )
    values: dict[str, Any] = {
        "element": element.name,
        "granularity": quantization.granularity,
        "scale": quantization.scale,
        "found": "current",
    }
    if isinstance(quantization.found, Delayed):
        values |= {"found": "delayed", **asdict(quantization.found)}
    values["rounding"] = quantization.rounding
    if quantization.hadamard is not None:
        values["hadamard"] = quantization.hadamard
    return [f"{key} = {_value(value)}" for key, value in values.items()]


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return toml.quoted(value) if isinstance(value, str) else str(value)


def read(source: str | PathLike[str]) -> dict[str, Any]:
    """Return the fields of the recipe in `source`, a path or the TOML text itself.

    Raises:
        PolicyError: it is not TOML, or not a recipe; the message names file and line.
    """
    file = toml.load(source)
    return fields_of(file.parse(_KEYS), file)


def fields_of(data: dict[str, Any], file: toml.Document, table: str = "") -> dict[str, Any]:
    """Return the fields of the recipe in `data`, which is all of `file` or one table of it.

    Raises:
        PolicyError: it is not a recipe; the message names file and line.
    """
    for key in data:
        if key not in _KEYS:
            raise PolicyError(
                f"{file.place(key, table)}: unknown key {key!r}; the keys are {', '.join(_KEYS)}."
            )
    for key in ("name", "source", "accumulate"):
        if not isinstance(data.get(key, ""), str):
            raise PolicyError(f"{file.place(key, table)}: {key} must be a string.")
    fields: dict[str, Any] = {key: data[key] for key in ("name", "source") if key in data}
    if "accumulate" in data:
        fields["accumulate"] = _dtype(data["accumulate"], file.place("accumulate", table))
    for role in ROLES:
        try:
            fields[role] = _role(data.get(role))
        except (TypeError, ValueError) as error:
            raise PolicyError(f"{file.place(role, table)}: [{role}]: {error}") from error
    if not any(fields[role] for role in ROLES):
        parent, _, name = table.rpartition(".")
        where = file.place(name, parent) if table else file.name
        raise PolicyError(f"{where}: quantises nothing; add a table [input], [weight] or [grad_output].")
    return fields


def _dtype(name: str, where: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise PolicyError(f"{where}: torch has no floating-point dtype {name!r}.")
    try:
        check_sums(dtype)
    except ValueError as error:
        raise PolicyError(f"{where}: {error}") from None
    return dtype


def check_sums(dtype: torch.dtype) -> None:
    """Raise ValueError unless products can be summed in `dtype`."""
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(
            f"accumulate must be a floating-point dtype of 16 bits or more, such as float32, got {dtype}."
        )


def _role(table: object) -> Quantization | None:
    if table is None:
        return None
    if not isinstance(table, dict):
        raise TypeError("must be a table.")
    unknown = [key for key in table if key not in _ROLE_KEYS]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; the keys are {', '.join(_ROLE_KEYS)}.")
    if "element" not in table:
        raise ValueError(f"element is missing: one of {', '.join(ELEMENTS)}.")
    if table["element"] not in [*ELEMENTS]:  # a list has no hash
        raise ValueError(f"element must be one of {', '.join(ELEMENTS)}, got {table['element']!r}.")
    fields = {k: v for k, v in table.items() if k not in _DELAYED} | {"element": ELEMENTS[table["element"]]}
    delayed = {k: v for k, v in table.items() if k in _DELAYED}
    if table.get("found") == "delayed":
        fields["found"] = Delayed(**delayed)
    elif delayed:
        raise ValueError(f"{', '.join(delayed)} belongs to found = 'delayed'.")
    if isinstance(table.get("granularity"), list):
        fields["granularity"] = tuple(table["granularity"])
    return Quantization(**fields)
