"""Redirect deprecated imports to the target, and add each missing import once."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import libcst as cst
from libcst import matchers as m
from libcst.helpers import get_full_name_for_node

from amp_compat.migrate.names import Target, parse_legacy
from amp_compat.migrate.stars import module_name
from amp_compat.migrate.tree import Parents, around

Statement = cst.BaseSmallStatement
Statements = cst.SimpleStatementLine | cst.SimpleStatementSuite
Line = Statements | cst.FlattenSentinel[cst.SimpleStatementLine] | cst.RemovalSentinel

_TORCH = frozenset({"torch", "amp_core", "apex"})


class _Place(NamedTuple):
    """The new source of an imported name; `drop` if the import is removed."""

    how: Literal["from", "import", "drop"]
    module: str = ""
    name: str = ""


class ImportEditor:
    """Collects the changes to a module's imports, then writes them."""

    def __init__(self, module: cst.Module, target: Target, parents: Parents) -> None:
        self._module = module
        self._target = target
        self._parents = parents
        self._needed: list[str] = []
        self._renamed: dict[cst.CSTNode, set[str]] = defaultdict(set)
        self._followed: dict[cst.CSTNode, list[Statement]] = defaultdict(list)
        self._following: set[tuple[cst.CSTNode, str]] = set()
        self.star_uses: set[str] = set()

    def need(self, module: str) -> None:
        """Request ``import module`` at the top of the file."""
        if module not in self._needed:
            self._needed.append(module)

    def follow(self, node: cst.CSTNode, module: str) -> None:
        """Request ``import module`` after the import `node`."""
        if (node, module) not in self._following:
            self._following.add((node, module))
            self._followed[node].append(cst.Import([cst.ImportAlias(_dotted(module))]))

    def loads_torch(self, above: cst.CSTNode) -> bool:
        """Return whether torch, or amp_core, which loads it, is always imported above the node `above`."""
        top = [above, *around(above, self._parents)][-2]
        first = _loads_torch(self._module.body)
        return first is not None and any(line is top for line in self._module.body[first:])

    def concerns(self, node: cst.CSTNode, bound: str) -> bool:
        """Return whether `node` binds `bound` to a deprecated name."""
        return any(_bound(a) == bound and self._place(node, a) for a in _aliases(node))

    def keeps_name(self, node: cst.CSTNode, bound: str) -> bool:
        """Return whether the target can be bound to the same name; submodules cannot."""
        places = [self._place(node, a) for a in _aliases(node) if _bound(a) == bound]
        return all(place is not None and place.how != "drop" for place in places)

    def rename(self, node: cst.CSTNode, bound: str, then: Sequence[Statement] = ()) -> None:
        """Make the import at `node` bind `bound` from the target, followed by the statements `then`."""
        self._renamed[node].add(bound)
        self._followed[node].extend(then)

    def is_renamed(self, node: cst.CSTNode, bound: str) -> bool:
        """Return whether the import at `node` binds `bound` from the target, or no longer."""
        return bound in self._renamed.get(node, ())

    def at_top(self, node: cst.CSTNode) -> bool:
        """Return whether the import statement `node` is at the top level of the module."""
        return self._parents[self._parents[node]] is self._module

    def lines(self) -> list[Statements]:
        """Return the lines whose imports change, those behind a colon included."""
        lines = [self._parents[node] for node in [*self._renamed, *self._followed]]
        return [line for line in dict.fromkeys(lines) if isinstance(line, Statements)]

    def edit_line(self, original: Statements, line: cst.CSTNode) -> Line:
        """Return `line` with its imports rewritten; `original` is the line as it was parsed."""
        assert isinstance(line, Statements)
        smalls: list[Statement] = []
        for old, new in zip(original.body, line.body, strict=True):
            smalls.extend(self._rewritten(old, new) if old in self._renamed else [new])
            smalls.extend(self._followed.get(old, ()))
        if isinstance(line, cst.SimpleStatementSuite):
            return line.with_changes(body=_plain(smalls) or [cst.Pass()])
        block = self._parents[original]
        alone = isinstance(block, cst.IndentedBlock) and len(block.body) == 1
        return _as_lines(_with_comments(line, smalls), smalls, alone=alone)

    def star_edit(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return an import of the used names in place of the star."""
        names = [cst.ImportAlias(cst.Name(name)) for name in sorted(self.star_uses)]
        return node.with_changes(module=_dotted(self._target.module), names=names)

    def add_to(self, module: cst.Module) -> cst.Module:
        """Return `module` with the needed imports added after its first block of imports.

        Standard-library imports go after those at the start of the block.
        """
        body = list(module.body)
        for name in sorted(self._needed, reverse=True):
            library = name.partition(".")[0] in sys.stdlib_module_names
            place = _end_of_imports(body, of_library=library)
            first = None if library else _loads_torch(body)
            if first is not None and first >= place:  # what is above may have to run before torch is loaded
                place = first + _end_of_imports(body[first:], of_library=False)
            body.insert(place, cst.SimpleStatementLine([cst.Import([cst.ImportAlias(_dotted(name))])]))
        return module.with_changes(body=body) if self._needed else module

    def _place(self, node: cst.CSTNode, alias: cst.ImportAlias) -> _Place | None:
        if isinstance(node, cst.ImportFrom):
            return self._place_from(f"{module_name(node)}.{alias.evaluated_name}")
        dotted = get_full_name_for_node(alias.name) or ""
        if parse_legacy(dotted) is None:
            return None
        if alias.asname is None:
            return _Place("import", "torch.amp" if self._target.module == "torch.amp" else "torch")
        return _Place("import", self._target.module) if dotted.count(".") == 2 else _Place("drop")

    def _place_from(self, dotted: str) -> _Place | None:
        legacy = parse_legacy(dotted)
        if legacy is None:
            return None
        if legacy.name:
            module, _, name = f"{self._target.module}.{self._target.suffix(legacy.name)}".rpartition(".")
            return _Place("from", module, name)
        if dotted.count(".") > 2:
            return _Place("drop")
        package, _, name = self._target.module.rpartition(".")
        return _Place("from", package, name) if package else _Place("import", name)

    def _rewritten(self, old: Statement, new: Statement) -> list[Statement]:
        bound = self._renamed[old]
        aliases = _aliases(new)
        places = [self._place(old, a) if _bound(a) in bound else None for a in _aliases(old)]
        if isinstance(new, cst.Import):
            return [new.with_changes(names=_import_aliases(aliases, places))] if any(places) else [new]
        assert isinstance(new, cst.ImportFrom)
        froms = {place.module for place in places if place is not None and place.how == "from"}
        if len(froms) == 1 and all(p is not None and p.how == "from" for p in places):
            names = [_renamed(a, p.name) for a, p in zip(aliases, places, strict=True) if p]
            return [new.with_changes(module=_dotted(froms.pop()), names=names)]
        return _split(new, aliases, places)


def bound_names(module: cst.Module) -> list[str]:
    """Return the names bound by the module's top-level imports, including those in ``try`` bodies."""
    names: list[str] = []
    for statement in module.body:
        lines = statement.body.body if isinstance(statement, cst.Try) else [statement]
        for line in lines:
            for small in line.body if isinstance(line, cst.SimpleStatementLine) else ():
                names.extend(_bound(a).partition(".")[0] for a in _aliases(small))
    return list(dict.fromkeys(names))


def _split(
    node: cst.ImportFrom, aliases: Sequence[cst.ImportAlias], places: Sequence[_Place | None]
) -> list[Statement]:
    moved: dict[str, list[cst.ImportAlias]] = defaultdict(list)
    result: list[Statement] = []
    kept: list[cst.ImportAlias] = []
    for alias, place in zip(aliases, places, strict=True):
        if place is None:
            kept.append(alias)
        elif place.how == "from":
            moved[place.module].append(_renamed(alias, place.name))
        elif place.how == "import":
            asname = None if _bound(alias) == place.module else cst.AsName(cst.Name(_bound(alias)))
            result.append(cst.Import([cst.ImportAlias(_dotted(place.module), asname)]))
    for module, names in moved.items():
        result.append(cst.ImportFrom(_dotted(module), _listed(names)))
    if kept:
        result.append(node.with_changes(names=_listed(kept, trailing=node.lpar is not None)))
    return result


def _listed(names: Sequence[cst.ImportAlias], *, trailing: bool = False) -> list[cst.ImportAlias]:
    """Return `names` separated by commas on one line."""
    if trailing and len(names) > 1:
        return list(names)
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    last = len(names) - 1
    return [
        n.with_changes(comma=cst.MaybeSentinel.DEFAULT if i == last else comma) for i, n in enumerate(names)
    ]


def _as_lines(line: cst.SimpleStatementLine, smalls: list[Statement], *, alone: bool) -> Line:
    if not smalls:
        return line.with_changes(body=[cst.Pass()]) if alone else cst.RemoveFromParent()
    if len(smalls) == len(line.body):
        return line.with_changes(body=smalls)
    plain = _plain(smalls)
    first = line.with_changes(body=[plain[0]])
    return cst.FlattenSentinel([first, *(cst.SimpleStatementLine([small]) for small in plain[1:])])


def _with_comments(line: cst.SimpleStatementLine, smalls: list[Statement]) -> cst.SimpleStatementLine:
    """Return `line` below the comments within its statements that `smalls` no longer have."""
    kept = _comments(smalls)
    lost = [text for text in _comments(line.body) if text not in kept]
    above = [cst.EmptyLine(comment=cst.Comment(text)) for text in lost]
    return line.with_changes(leading_lines=[*line.leading_lines, *above]) if smalls else line


def _comments(smalls: Sequence[Statement]) -> list[str]:
    found = [comment for small in smalls for comment in m.findall(small, m.Comment())]
    return [cast("cst.Comment", comment).value for comment in found]


def _plain(smalls: Sequence[Statement]) -> list[Statement]:
    """Return `smalls` with semicolons only where they are needed."""
    return [small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for small in smalls]


def _import_aliases(
    aliases: Sequence[cst.ImportAlias], places: Sequence[_Place | None]
) -> list[cst.ImportAlias]:
    result: list[cst.ImportAlias] = []
    for alias, place in zip(aliases, places, strict=True):
        if place is None or place.how == "drop":
            result.append(alias)
        else:
            same = alias.asname is not None and _bound(alias) == place.module
            changes = {"name": _dotted(place.module)} | ({"asname": None} if same else {})
            result.append(alias.with_changes(**changes))
    return result


def _end_of_imports(
    body: Sequence[cst.BaseStatement | cst.BaseCompoundStatement], *, of_library: bool
) -> int:
    place = 0
    for index, statement in enumerate(body):
        smalls = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
        is_import = bool(smalls) and all(_is_import(s, of_library=of_library) for s in smalls)
        first = smalls[0] if index == 0 and smalls else None
        is_docstring = isinstance(first, cst.Expr) and isinstance(first.value, cst.SimpleString)
        is_magic = isinstance(first, cst.Pass)  # of a notebook's first cell, which may have to begin with it
        if not (is_import or is_docstring or is_magic):
            break
        place = index + 1
    return place


def _loads_torch(body: Sequence[cst.CSTNode]) -> int | None:
    """Return the position of the first statement in `body` that imports torch, or a part of it."""
    for index, statement in enumerate(body):
        smalls = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
        if any(name.partition(".")[0] in _TORCH for small in smalls for name in _modules(small)):
            return index
    return None


def _is_import(node: cst.CSTNode, *, of_library: bool) -> bool:
    """Return whether `node` is an import (with `of_library`, of the standard library only)."""
    if not isinstance(node, (cst.Import, cst.ImportFrom)):
        return False
    return not of_library or all(name.partition(".")[0] in sys.stdlib_module_names for name in _modules(node))


def _modules(node: cst.CSTNode) -> list[str]:
    """Return the names of the modules that `node` imports, or imports from."""
    if isinstance(node, cst.Import):
        return [get_full_name_for_node(alias.name) or "" for alias in node.names]
    return [module_name(node) or ""] if isinstance(node, cst.ImportFrom) else []


def _renamed(alias: cst.ImportAlias, name: str) -> cst.ImportAlias:
    return alias if alias.evaluated_name == name else alias.with_changes(name=cst.Name(name))


def _dotted(name: str) -> cst.Attribute | cst.Name:
    node = cst.parse_expression(name)
    assert isinstance(node, (cst.Attribute, cst.Name))
    return node


def _bound(alias: cst.ImportAlias) -> str:
    return alias.evaluated_alias or alias.evaluated_name


def _aliases(node: cst.CSTNode) -> Sequence[cst.ImportAlias]:
    if isinstance(node, cst.Import):
        return node.names
    if isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar):
        return node.names
    return ()
