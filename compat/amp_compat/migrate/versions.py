"""Find the uses that run only on old versions of torch: another branch has the successor."""

from __future__ import annotations

import re

import libcst as cst

from amp_compat.migrate.bindings import Resolver, successors
from amp_compat.migrate.tree import NameWalker, around

_ASKS_VERSION = re.compile(r"version|hasattr|greater|torch\w*\d", re.IGNORECASE)


def beside_successor(node: cst.BaseExpression, name: str, resolver: Resolver) -> bool:
    """Return whether `node` is in the branch for a torch without the successor of `name`."""
    branch: cst.CSTNode = node
    for outer in around(node, resolver.parents):
        others: list[cst.CSTNode | None] = []
        if isinstance(outer, (cst.If, cst.IfExp)) and branch is not outer.test and _asks_version(outer.test):
            others = [other for other in (outer.body, outer.orelse) if other is not branch]
        elif isinstance(outer, cst.Try) and isinstance(branch, cst.ExceptHandler):
            others = [outer.body]
        if any(other is not None and _mentions(other, name, resolver) for other in others):
            return True
        branch = outer
    return False


def _asks_version(test: cst.BaseExpression) -> bool:
    return _ASKS_VERSION.search(cst.Module([]).code_for_node(test)) is not None


def _mentions(node: cst.CSTNode, name: str, resolver: Resolver) -> bool:
    finder = _Finder(name, resolver)
    node.visit(finder)
    return finder.found


class _Finder(NameWalker):
    def __init__(self, name: str, resolver: Resolver) -> None:
        super().__init__()
        self.found = False
        self._successors, self._resolver = successors(name), resolver

    def take(self, node: cst.BaseExpression) -> bool:
        resolved = self._resolver.resolve(node)
        self.found = self.found or (resolved is not None and resolved.dotted in self._successors)
        return self.found
