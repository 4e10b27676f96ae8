"""Collect every use of a deprecated name."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator

import libcst as cst
from libcst import matchers as m
from libcst.helpers import get_full_name_for_node

from amp_compat.migrate.bindings import Resolved, Resolver
from amp_compat.migrate.names import OBJECTS, parse_legacy
from amp_compat.migrate.plan import Plan, Use
from amp_compat.migrate.rules import classify, no_successor
from amp_compat.migrate.stars import module_name
from amp_compat.migrate.tree import NameWalker, Parents, syntax_error
from amp_compat.migrate.versions import beside_successor

_BINDING = (
    cst.FunctionDef,
    cst.ClassDef,
    cst.AsName,
    cst.NameItem,
    cst.MatchAs,
    cst.MatchStar,
    cst.MatchMapping,
)

_CHAIN = re.compile(rf"(?:^|\.)(cuda|cpu)\.amp\.(?:\w+\.)?({'|'.join(sorted(OBJECTS))})$")
_OF_AMP = m.Attribute(m.Attribute(attr=m.Name("amp")), m.Name(m.MatchIfTrue(OBJECTS.__contains__)))
_FROM_TORCH = re.compile(r"\btorch\.(?:cuda|cpu)\.amp\.")

_IN_STRING = re.compile(r"\btorch\.(?:cuda|cpu)(?:\.amp\b| import .*\bamp\b)")
_DOCTEST = re.compile(r"^\s*(?:>>>|\.\.\.) ([^#\n]*)", re.MULTILINE)


class Collector(NameWalker):
    """Walks a module once and fills a `Plan`."""

    def __init__(self, resolver: Resolver, parents: Parents) -> None:
        super().__init__()
        self.plan = Plan()
        self._resolver = resolver
        self._parents = parents

    def visit_Name(self, node: cst.Name) -> None:
        """Record a bare name unless its parent binds it."""
        parent = self._parents.get(node)
        if not isinstance(parent, _BINDING):
            self.take(node)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        """Record imports of names that a deprecated module has, but its successor has not."""
        module = module_name(node) or ""
        legacy = parse_legacy(module)
        if legacy is None or legacy.name or isinstance(node.names, cst.ImportStar):
            return False
        for alias in node.names:
            name = alias.evaluated_name
            if parse_legacy(f"{module}.{name}") is None:
                self.plan.others.append((alias, f"{legacy.dotted}.{name}", no_successor(legacy, name)))
        return False

    def visit_Call(self, node: cst.Call) -> bool:
        """Treat ``getattr(module, "name")`` as the name itself."""
        return not self.take(node)

    def visit_Param(self, node: cst.Param) -> bool:
        """Visit only the annotation and the default."""
        for part in (node.annotation, node.default):
            if part is not None:
                part.visit(self)
        return False

    def visit_MatchKeywordElement(self, node: cst.MatchKeywordElement) -> bool:
        """Visit only the pattern: the keyword is an attribute."""
        node.pattern.visit(self)
        return False

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:
        """Skip the plain names on the left: they are bindings, not uses."""
        for target in _parts(node.target):
            if not isinstance(target, cst.Name):
                target.visit(self)
        return False

    def visit_AnnAssign(self, node: cst.AnnAssign) -> bool:
        """Skip a plain name on the left, as in `visit_AssignTarget`."""
        parts = [node.annotation, node.value, None if isinstance(node.target, cst.Name) else node.target]
        for part in parts:
            if part is not None:
                part.visit(self)
        return False

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        """Record strings that contain a deprecated name in code, not in prose."""
        if "torch" in node.value and "amp" in node.value and _has_code(node):
            self.plan.strings.append(node)

    def take(self, node: cst.BaseExpression) -> bool:
        """Record a use."""
        resolved = self._resolver.resolve(node)
        legacy = parse_legacy(resolved.dotted) if resolved else None
        if resolved is None or legacy is None:
            return self._take_unknown(node, resolved)
        use = Use(node, legacy, resolved)
        use.manual = resolved.conflict
        if legacy.name and beside_successor(node, legacy.name, self._resolver):
            use.manual = "another branch uses the successor; if that is always available, remove this branch"
        if not use.manual:
            classify(use, self._parents, self._resolver)
        self.plan.add(use)
        return True

    def _take_unknown(self, node: cst.BaseExpression, resolved: Resolved | None) -> bool:
        """Record ``x.amp.name`` if `x` may be ``torch.cuda`` or ``torch.cpu``, but is not for certain."""
        name = get_full_name_for_node(node) if isinstance(node, cst.Attribute) else None
        found = _CHAIN.search(name) if name is not None else None
        if name is None or (resolved is not None and not _FROM_TORCH.search(resolved.dotted)):
            return False
        if found is None:
            return resolved is None and self._take_possible(node)
        root = name[: found.start()] or found[1]
        reason = f"`{root}` is not imported from torch here; if it is torch's, rewrite this by hand"
        self.plan.others.append((node, f"torch.{found[1]}.amp.{found[2]}", reason))
        return True

    def _take_possible(self, node: cst.BaseExpression) -> bool:
        """Record ``x.amp.name`` if one of the values of `x` is ``torch.cuda`` or ``torch.cpu``."""
        if not m.matches(node, _OF_AMP):
            return False
        assert isinstance(node, cst.Attribute)
        assert isinstance(node.value, cst.Attribute)
        module = self._resolver.possible_device(node.value.value)
        if module:
            reason = f"it may be that of `{module}` or of another module; rewrite it by hand"
            self.plan.others.append((node, f"{module}.amp.{node.attr.value}", reason))
        return bool(module)


def _parts(target: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    if isinstance(target, (cst.Tuple, cst.List)):
        for element in target.elements:
            yield from _parts(element.value)
    else:
        yield target


def _has_code(node: cst.SimpleString) -> bool:
    """Return whether a string is code that uses a deprecated name, or has such doctests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes
        text = node.evaluated_value
        if not isinstance(text, str) or _IN_STRING.search(text) is None:
            return False
        code = textwrap.dedent(text).strip()
        nodes = ast.walk(ast.parse(code)) if syntax_error(code) is None else ()
    names = [ast.unparse(n) for n in nodes if isinstance(n, (ast.Attribute, ast.Import, ast.ImportFrom))]
    return any(_IN_STRING.search(line) for line in [*names, *_DOCTEST.findall(text)])
