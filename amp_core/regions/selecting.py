"""Select modules of a model: by a glob over names, by class, or one by itself."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from amp_core.errors import PolicyError

Selector = Any
"""A glob over names, a class of modules or its name, or a module."""

CLASS_PATH = re.compile(r"[^\s:*?\[]+:[\w.<>]+")
"""Matches ``package.module:Class``."""


def _class_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def select(model: nn.Module, selector: Selector) -> tuple[list[str], str]:
    """Return the first names of the modules that `selector` selects, and the selector as text.

    Raises:
        PolicyError: it selects none.
    """
    if isinstance(selector, nn.Module):
        names = _first_names(model, [selector])
        if not names:
            raise PolicyError(
                f"The {type(selector).__name__} is not a module of this {type(model).__name__}."
            )
        return names, glob_of(names[0])
    if isinstance(selector, type):
        selector = _class_name(selector)
    if not isinstance(selector, str):
        raise PolicyError(f"{selector!r} does not select modules; use a glob, a module or a module class.")
    if CLASS_PATH.fullmatch(selector):
        kinds = {module: [*map(_class_name, type(module).__mro__)] for module in model.modules()}
        selected = [module for module, classes in kinds.items() if selector in classes]
        if not selected:
            near = sorted({classes[0] for classes in kinds.values()})
            raise _matches_no("module", selector, model, near, str)
    else:
        named = [*model.named_modules(remove_duplicate=False)]  # modules may share one
        selected = [module for name, module in named if matches(name, selector)]
        if not selected:
            raise _matches_no("module", selector, model, [name for name, _ in named])
    return _first_names(model, selected), selector


def _first_names(model: nn.Module, selected: Iterable[nn.Module]) -> list[str]:
    ids = set(map(id, selected))
    return [name for name, module in model.named_modules() if id(module) in ids]


def glob_of(name: str) -> str:
    """Return the selector that selects the module with this name alone."""
    return re.sub(r"([*?\[:])", r"[\1]", name)  # with a colon, it may look like the path of a class


def matching(names: Iterable[str], globs: Iterable[str], kind: str, model: nn.Module) -> set[str]:
    """Return those `names` of tensors of `model` that a glob matches, as globs match modules.

    Raises:
        PolicyError: a glob matches none; `kind` says of what.
    """
    names = [*names]
    found: set[str] = set()
    for glob in globs:
        mine = [name for name in names if matches(name, glob)]
        if not mine:
            raise _matches_no(kind, glob, model, names)
        found.update(mine)
    return found


def matches(name: str, glob: str) -> bool:
    """Return whether `glob` matches a dotted name: ``*`` one part of it, ``**`` any number of parts."""
    return _is_match(_parts(name), _parts(glob))


def _parts(text: str) -> list[str]:
    return text.split(".") if text else []  # the model itself has the name ""


def _matches_no(
    kind: str, selector: str, model: nn.Module, near: list[str], selector_of: Callable[[str], str] = glob_of
) -> PolicyError:
    """Return the error of a selector that selects no module or tensor of `model`, with `near` names."""
    close = [*map(selector_of, difflib.get_close_matches(selector, near, n=3, cutoff=0.5))]
    hint = f"near names are {', '.join(map(repr, close))}" if close else listed([*map(selector_of, near)])
    return PolicyError(f"{selector!r} matches no {kind} of {type(model).__name__}; {hint}.")


def _is_match(name: list[str], glob: list[str]) -> bool:
    if not glob:
        return not name
    if glob[0] == "**":
        return any(_is_match(name[i:], glob[1:]) for i in range(len(name) + 1))
    return bool(name) and fnmatch.fnmatchcase(name[0], glob[0]) and _is_match(name[1:], glob[1:])


def listed(names: Sequence[str]) -> str:
    """Return text for messages: the first of these names."""
    more = [f"and {len(names) - 8} more"] if len(names) > 8 else []
    return f"the names are {', '.join([*map(repr, names[:8]), *more])}"
