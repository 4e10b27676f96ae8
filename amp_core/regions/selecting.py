"""Select modules of a model: by a glob over names, by class, or one by itself."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from amp_core.errors import PolicyError

Selector = Any
"""A glob over names, a class of modules or its name, or a module."""

CLASS_PATH = re.compile(r"[^\s:*?\[]+:[\w.<>]+")
"""Matches ``package.module:Class``."""
_WILDCARD = re.compile(r"[*?\[]")


def _class_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


class Modules:
    """The modules of a model, looked up once for any number of selectors."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first_names = {module: name for name, module in model.named_modules()}

    @functools.cached_property
    def _named(self) -> dict[str, nn.Module]:
        return dict(self._model.named_modules(remove_duplicate=False))  # modules may share one

    @functools.cached_property
    def _by_class(self) -> dict[str, list[nn.Module]]:
        found: dict[str, list[nn.Module]] = {}
        for module in self._first_names:
            for name in dict.fromkeys(map(_class_name, type(module).__mro__)):
                found.setdefault(name, []).append(module)
        return found

    def select(self, selector: Selector) -> tuple[list[str], str]:
        """Return the first names of the modules that `selector` selects, and the selector as text.

        Raises:
            PolicyError: it selects none.
        """
        if isinstance(selector, nn.Module):
            name = self._first_names.get(selector)
            if name is None:
                raise PolicyError(
                    f"The {type(selector).__name__} is not a module of this {type(self._model).__name__}."
                )
            return [name], glob_of(name)
        if isinstance(selector, type):
            selector = _class_name(selector)
        if not isinstance(selector, str):
            raise PolicyError(
                f"{selector!r} does not select modules; use a glob, a module or a module class."
            )
        if CLASS_PATH.fullmatch(selector):
            selected = self._by_class.get(selector, [])
            if not selected:
                near = sorted({_class_name(type(module)) for module in self._first_names})
                raise _matches_no("module", selector, self._model, near, str)
            return [self._first_names[module] for module in selected], selector
        names = _matched(self._named, selector)
        if not names:
            raise _matches_no("module", selector, self._model, [*self._named])
        chosen = {id(self._named[name]) for name in names}
        if len(chosen) == 1:
            return [self._first_names[self._named[names[0]]]], selector
        return [name for module, name in self._first_names.items() if id(module) in chosen], selector


def glob_of(name: str) -> str:
    """Return the selector that selects the module with this name alone."""
    return re.sub(r"([*?\[:])", r"[\1]", name)  # with a colon, it may look like the path of a class


def matching(names: Iterable[str], globs: Iterable[str], kind: str, model: nn.Module) -> set[str]:
    """Return those `names` of tensors of `model` that a glob matches, as globs match modules.

    Raises:
        PolicyError: a glob matches none; `kind` says of what.
    """
    known = dict.fromkeys(names)
    found: set[str] = set()
    for glob in globs:
        mine = _matched(known, glob)
        if not mine:
            raise _matches_no(kind, glob, model, [*known])
        found.update(mine)
    return found


def _matched(names: Mapping[str, object], glob: str) -> list[str]:
    """Return those `names` that `glob` matches; one without wildcards is looked up."""
    if not _WILDCARD.search(glob):
        return [glob] if glob in names else []
    return [name for name in names if matches(name, glob)]


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
    at = of_glob = 0
    begin, after = 0, None  # where the last ** may end next, and what follows it
    while at < len(name):
        part = glob[of_glob] if of_glob < len(glob) else None
        if part == "**":
            of_glob += 1
            begin, after = at, of_glob
        elif part is not None and fnmatch.fnmatchcase(name[at], part):
            at, of_glob = at + 1, of_glob + 1
        elif after is not None:  # an earlier ** need not take more: the last one can
            begin += 1
            at, of_glob = begin, after
        else:
            return False
    return all(part == "**" for part in glob[of_glob:])


def listed(names: Sequence[str]) -> str:
    """Return text for messages: the first of these names."""
    more = [f"and {len(names) - 8} more"] if len(names) > 8 else []
    return f"the names are {', '.join([*map(repr, names[:8]), *more])}"
