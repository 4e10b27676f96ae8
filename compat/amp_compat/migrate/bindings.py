"""Resolve names through imports, aliases, shadowing and fallbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import libcst as cst
from libcst import matchers as m
from libcst.helpers import get_full_name_for_node
from libcst.metadata import Assignment, BaseAssignment, ClassScope, GlobalScope, ImportAssignment, Scope

from amp_compat.migrate.names import DEVICE_MODULES, parse_legacy
from amp_compat.migrate.stars import module_name, star_imports
from amp_compat.migrate.tree import Parents, around, root_of

_ON_THE_WAY = {"torch", *DEVICE_MODULES}
_GETATTR = m.Call(func=m.Name("getattr"), args=[m.Arg(), m.Arg(), m.ZeroOrMore()])
_CALLED = {"autocast", "GradScaler", "custom_fwd", "custom_bwd"}


@dataclass(frozen=True)
class Resolved:
    """The meaning of an expression.

    Attributes:
        dotted: the fully qualified name.
        bindings: the bindings of the expression's first name; several if branches import the same object.
        alias: the first name was bound by ``name = <deprecated object>``, not by an import.
        fallback: an ``except`` branch binds the same name to a substitute.
        shared: other branches bind the name to something else, so calls must keep their form and the
            import must become an alias.
        conflict: why the meaning is ambiguous, or "".
    """

    dotted: str
    bindings: tuple[BaseAssignment, ...] = ()
    alias: bool = False
    fallback: bool = False
    shared: bool = False
    conflict: str = ""


class Resolver:
    """Resolves names and attribute chains of one module.

    Args:
        scopes: libcst's scope of each node.
        parents: libcst's parent of each node.
        stars: full names of the names that star imports of deprecated modules bind.
    """

    def __init__(
        self,
        scopes: Mapping[cst.CSTNode, Scope | None],
        parents: Parents,
        stars: Mapping[str, str],
    ) -> None:
        self._scopes = scopes
        self.parents = parents
        self._stars = stars
        self._active: set[tuple[Scope, str]] = set()

    def resolve(self, node: cst.BaseExpression) -> Resolved | None:
        """Return the meaning of `node`, or None if it is unknown."""
        if isinstance(node, cst.Name):
            return self._name(node)
        if isinstance(node, cst.Attribute):
            return _join(self.resolve(node.value), node.attr.value)
        word = getattr_literal(node)
        if word is not None and isinstance(node, cst.Call):
            found = _join(self.resolve(node.args[0].value), word)
            return found if len(node.args) == 2 else _unless_missing(found)
        return None

    def scopes(self) -> set[Scope]:
        """Return every scope of the module."""
        return {scope for scope in self._scopes.values() if scope is not None}

    def import_meaning(self, binding: BaseAssignment, name: str) -> str | None:
        """Return the full name that an import binds `name` to; None for other bindings."""
        return _imported(binding.node, name) if isinstance(binding, ImportAssignment) else None

    def imports_of(self, node: cst.BaseExpression) -> list[ImportAssignment]:
        """Return the imports that the first name of `node` comes from, also through aliases."""
        root, found = root_of(node), list[ImportAssignment]()
        scope = self.scope_of(root)
        for binding in scope[root.value] if isinstance(root, cst.Name) and scope is not None else ():
            value, bound = self._value(binding), (binding.scope, binding.name)
            if isinstance(binding, ImportAssignment):
                found.append(binding)
            elif value is not None and bound not in self._active:
                self._active.add(bound)
                found += self.imports_of(value)
                self._active.discard(bound)
        return found

    def possible_device(self, node: cst.BaseExpression) -> str:
        """Return the module of a device that `node`, or what it is assigned from, may be: of CUDA or CPUs."""
        scope = self.scope_of(node)
        bindings = scope[node.value] if isinstance(node, cst.Name) and scope is not None else ()
        values = [node, *filter(None, map(self._value, bindings))]
        parts = [part for value in values for part in m.findall(value, m.Attribute() | m.Call())]
        modules = [self._device_module(part) for part in parts]
        return next(filter(None, modules), "")

    def _device_module(self, part: cst.CSTNode) -> str:
        if isinstance(part, cst.Call) and m.matches(part, _GETATTR) and getattr_literal(part) is None:
            owner = self.resolve(part.args[0].value)  # the module of any device
            return "torch.cuda" if owner is not None and owner.dotted == "torch" else ""
        found = self.resolve(part) if isinstance(part, (cst.Attribute, cst.Call)) else None
        return found.dotted if found is not None and found.dotted in DEVICE_MODULES else ""

    def reaches(self, node: cst.CSTNode, binding: ImportAssignment) -> bool:
        """Return whether what is imported where `binding` is can be used at `node`, too."""
        scopes = [self.scope_of(each) for each in (node, *around(node, self.parents))]
        return binding.scope in scopes and self.scope_of(binding.node) is binding.scope  # no `global`

    def is_imported_above(self, node: cst.CSTNode, name: str, module: str) -> bool:
        """Return whether an import of `module` as `name` is above `node`, in a block that it is in."""
        inner = node
        for outer in around(node, self.parents):
            for line in outer.body if isinstance(outer, (cst.IndentedBlock, cst.Module)) else ():
                if line is inner:
                    break
                smalls = line.body if isinstance(line, cst.SimpleStatementLine) else ()
                if any(_imported(small, name) == module for small in smalls):
                    return True
            inner = outer
        return False

    def has_successor(self, binding: BaseAssignment) -> bool:
        """Return whether all other branches bind the name of `binding` to its successor."""
        legacy = parse_legacy(self.import_meaning(binding, binding.name) or "")
        others = {self.import_meaning(other, binding.name) for other in self.others(binding)}
        return legacy is not None and bool(others) and others <= successors(legacy.name)

    def others(self, binding: BaseAssignment) -> list[BaseAssignment]:
        """Return the bindings of the same name to objects that are not deprecated."""
        meanings = [(b, self._meaning(b, binding.name)) for b in binding.scope[binding.name]]
        return [b for b, m in meanings if not (m and parse_legacy(m.dotted))]

    def is_local(self, name: str, module: str, at: cst.CSTNode) -> bool:
        """Return whether `name` is a local variable at the node `at`, but no import of `module` above it."""
        scope = self.scope_of(at)
        bindings = [] if scope is None else list(scope[name])
        local = [b for b in bindings if isinstance(b, Assignment) and not isinstance(b.scope, GlobalScope)]
        others = any(self.import_meaning(binding, name) != module for binding in local)
        return others or (bool(local) and not self.is_imported_above(at, name, module))

    def scope_of(self, node: cst.CSTNode) -> Scope | None:
        """Return the scope of `node`."""
        scopes = (self._scopes.get(each) for each in (node, *around(node, self.parents)))
        return next((scope for scope in scopes if scope is not None), None)

    def _name(self, node: cst.Name) -> Resolved | None:
        scope = self.scope_of(node)
        bindings = list(scope[node.value]) if scope is not None else []
        if isinstance(scope, ClassScope) and any(self._value(b) is node for b in bindings):
            bindings = list(scope.parent[node.value])  # in a class, `name = name` reads the outer one
        if not bindings:
            star = self._stars.get(node.value)
            return Resolved(star) if star else None
        meanings = [(b, self._meaning(b, node.value)) for b in bindings]
        certain = [(b, m) for b, m in meanings if not self._is_fallback(b, m)]
        names = {m.dotted if m else None for _, m in certain}
        star = self._star_below(node.value, bindings)
        if star is not None:
            return Resolved(star, tuple(bindings), conflict=_conflict(node.value, {star, *names}))
        imported = {isinstance(b, ImportAssignment) for b, _ in certain}
        if len(names) == 1 and certain[0][1] is not None and (len(imported) == 1 or not _called(names)):
            meaning = certain[0][1]
            fallback = any(not _is_none(self._value(b)) for b, _ in meanings if (b, _) not in certain)
            assigned = not isinstance(certain[0][0], ImportAssignment)
            alias = meaning.alias or (assigned and parse_legacy(meaning.dotted) is not None)
            imports = tuple(b for b, _ in certain)
            return replace(meaning, bindings=imports, alias=alias, fallback=fallback)
        return self._unclear(node.value, certain)

    def _star_below(self, name: str, bindings: list[BaseAssignment]) -> str | None:
        """Return the full name that a star import binds `name` to after one of its `bindings`, or None."""
        first = bindings[0]
        if name not in self._stars or not isinstance(first.scope, GlobalScope):
            return None
        assert isinstance(first, Assignment)
        *_, top, module = [None, *around(first.node, self.parents)]
        assert isinstance(module, cst.Module)
        below = module.body[[each is top for each in module.body].index(True) :]
        return self._stars[name] if star_imports(below) else None

    def _unclear(self, name: str, meanings: list[tuple[BaseAssignment, Resolved | None]]) -> Resolved | None:
        """Return the meaning of a name with several bindings, some of them deprecated."""
        legacy = [(b, m) for b, m in meanings if m and parse_legacy(m.dotted)]
        # `f = torch.cuda.amp.autocast` beside `f = nullcontext`: leave `f` itself alone.
        if all(self._free_alias(b, m) for b, m in legacy if m):
            return None
        names = {m.dotted if m else None for _, m in meanings}
        objects = {parsed.name for _, m in legacy if m and (parsed := parse_legacy(m.dotted))}
        first = legacy[0][1]
        assert first is not None
        if self.has_successor(legacy[0][0]):
            return None
        bound = tuple(b for b, _ in legacy)
        if len(objects) == 1 and objects <= _CALLED:
            return Resolved(first.dotted, bound, alias=True, shared=True)
        return Resolved(first.dotted, bound, conflict=_conflict(name, names))

    def _free_alias(self, binding: BaseAssignment, meaning: Resolved) -> bool:
        legacy = parse_legacy(meaning.dotted)
        return not isinstance(binding, ImportAssignment) and legacy is not None and bool(legacy.name)

    def _meaning(self, binding: BaseAssignment, name: str) -> Resolved | None:
        if isinstance(binding, ImportAssignment):
            dotted = _imported(binding.node, name)
            return Resolved(dotted) if dotted else None
        value, bound = self._value(binding), (binding.scope, binding.name)
        if value is None or bound in self._active:
            return None
        self._active.add(bound)
        try:
            meaning = self.resolve(value)
        finally:
            self._active.discard(bound)
        known = meaning is not None and (meaning.dotted in _ON_THE_WAY or parse_legacy(meaning.dotted))
        return meaning if known else None

    def _value(self, binding: BaseAssignment) -> cst.BaseExpression | None:
        """Return the right-hand side of ``name = value``, or None for other bindings."""
        if isinstance(binding, ImportAssignment) or not isinstance(binding, Assignment):
            return None
        parent = self.parents.get(binding.node)
        if isinstance(parent, cst.AssignTarget):
            statement = self.parents[parent]
            return statement.value if isinstance(statement, cst.Assign) else None
        return parent.value if isinstance(parent, cst.AnnAssign) else None

    def _is_fallback(self, binding: BaseAssignment, meaning: Resolved | None) -> bool:
        """Return whether `binding` only replaces a missing deprecated name (torch before 1.6)."""
        if (
            meaning is not None
            or isinstance(binding, ImportAssignment)
            or not isinstance(binding, Assignment)
        ):
            return False
        return _is_none(self._value(binding)) or self.in_except(binding.node)

    def in_except(self, node: cst.CSTNode) -> bool:
        """Return whether `node` is in an ``except`` block."""
        return any(isinstance(each, cst.ExceptHandler) for each in (node, *around(node, self.parents)))


def getattr_literal(node: cst.BaseExpression) -> str | None:
    """Return the attribute that ``getattr(x, "literal")`` reads, also with a default; else None."""
    if not (isinstance(node, cst.Call) and len(node.args) in {2, 3} and m.matches(node, _GETATTR)):
        return None
    word = node.args[1].value
    return str(word.evaluated_value) if isinstance(word, cst.SimpleString) else None


def _imported(node: cst.CSTNode, name: str) -> str | None:
    if isinstance(node, cst.Import):
        for alias in node.names:
            dotted = get_full_name_for_node(alias.name) or ""
            bound = alias.evaluated_alias
            if bound == name:
                return dotted
            if bound is None and dotted.partition(".")[0] == name:
                return name
    elif isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar):
        for alias in node.names:
            if (alias.evaluated_alias or alias.evaluated_name) == name:
                module = module_name(node)
                return f"{module}.{alias.evaluated_name}" if module else f".{alias.evaluated_name}"
    return None


def _join(base: Resolved | None, word: str) -> Resolved | None:
    return None if base is None else replace(base, dotted=f"{base.dotted}.{word}")


def _unless_missing(found: Resolved | None) -> Resolved | None:
    """Return the meaning of ``getattr(torch.cuda, "amp", default)``; None if it is no deprecated module."""
    legacy = parse_legacy(found.dotted) if found is not None else None
    if found is None or legacy is None or legacy.name:
        return None
    return replace(found, conflict="getattr with a default: rewrite it and the uses of its value by hand")


def _is_none(node: cst.BaseExpression | None) -> bool:
    return isinstance(node, cst.Name) and node.value in {"None", "False"}


def _called(names: set[str | None]) -> bool:
    """Return whether an alias of one of `names` takes other arguments than an import of it."""
    parsed = [parse_legacy(name) for name in names if name]
    return any(legacy is not None and legacy.name in _CALLED for legacy in parsed)


def successors(name: str) -> set[str | None]:
    """Return the full names of the successors of a deprecated name."""
    modules = ("torch", "torch.amp", "torch.amp.autocast_mode", "torch.amp.grad_scaler", "amp_core")
    return {f"{module}.{name}" for module in modules if name}


def _conflict(name: str, meanings: set[str | None]) -> str:
    known = sorted(m for m in meanings if m) + ["something else"] * (None in meanings)
    if len(known) == 1:
        return f"`{name}` is bound to {known[0]} twice, by name and by a star import: remove one of them"
    return f"`{name}` is bound to {' and to '.join(known)}; the choice is made at run time"
