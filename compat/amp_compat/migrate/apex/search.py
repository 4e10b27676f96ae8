"""Syntax-tree queries for rewriting ``apex.amp``."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import libcst as cst
from libcst.metadata import BaseAssignment

from amp_compat.migrate.apex.calls import CannotFollowError
from amp_compat.migrate.bindings import Resolver
from amp_compat.migrate.model import CELL_MARK
from amp_compat.migrate.tree import NameWalker


class Uses(NameWalker):
    """Collects expressions that resolve to a name in ``apex.amp``."""

    def __init__(self, resolver: Resolver) -> None:
        super().__init__()
        self._resolver = resolver
        self.uses: list[tuple[cst.CSTNode, str]] = []
        self.bindings: list[BaseAssignment] = []

    def take(self, node: cst.BaseExpression) -> bool:
        """Record a use, and the binding of its first name."""
        resolved = self._resolver.resolve(node)
        if resolved is None or not f"{resolved.dotted}.".startswith("apex.amp."):
            return False
        if resolved.conflict or resolved.dotted == "apex.amp":
            raise CannotFollowError(node, resolved.conflict or "the module apex.amp is used as an object")
        self.uses.append((node, resolved.dotted[len("apex.amp.") :]))
        self.bindings.extend(resolved.bindings)
        return True


class GradientReads(cst.CSTVisitor):
    """Collects code that reads gradients: ``.grad``, ``clip_grad...``, ``amp.master_params``."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[cst.CSTNode] = []

    def visit_Attribute_attr(self, node: cst.Attribute) -> None:
        """Record ``x.grad`` and functions that read gradients."""
        if node.attr.value in {"grad", "master_params"} or "clip_grad" in node.attr.value:
            self.nodes.append(node)

    def visit_Call(self, node: cst.Call) -> None:
        """Record functions that were imported by name."""
        if isinstance(node.func, cst.Name) and (
            "clip_grad" in node.func.value or node.func.value == "master_params"
        ):
            self.nodes.append(node)


class _Calls(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[cst.Call] = []

    def visit_Call(self, node: cst.Call) -> None:
        self.nodes.append(node)


def calls_of(module: cst.Module, function: str, within: cst.CSTNode) -> list[cst.Call]:
    """Return the calls in `within` whose callee reads exactly `function`."""
    calls = _Calls()
    within.visit(calls)
    return [call for call in calls.nodes if module.code_for_node(call.func) == function]


def uses_model(module: cst.Module, statement: cst.CSTNode, model: str) -> bool:
    """Return whether `statement` calls the model or passes it to a call."""
    if isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
        return False
    calls = _Calls()
    statement.visit(calls)
    called = {module.code_for_node(call.func) for call in calls.nodes}
    passed = {module.code_for_node(arg.value) for call in calls.nodes for arg in call.args}
    return bool(called & {model, f"{model}.forward", f"{model}.module"}) or model in passed


def runs_backward_or_step(statement: cst.CSTNode) -> bool:
    """Return whether `statement` contains a backward pass or a step."""
    return bool(_methods(statement, {"backward", "step"}))


def backward_calls(module: cst.Module) -> list[cst.Call]:
    """Return the calls of methods named ``backward``."""
    return _methods(module, {"backward"})


def _methods(within: cst.CSTNode, names: Set[str]) -> list[cst.Call]:
    calls = _Calls()
    within.visit(calls)
    return [c for c in calls.nodes if isinstance(c.func, cst.Attribute) and c.func.attr.value in names]


def binds(statement: cst.CSTNode, loss: cst.BaseExpression) -> bool:
    """Return whether `statement`, or one nested in it, assigns to the name `loss`."""
    targets = _Targets()
    if isinstance(loss, cst.Name) and not isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
        statement.visit(targets)
    return isinstance(loss, cst.Name) and loss.value in targets.names


class _Targets(cst.CSTVisitor):
    """Collects assigned names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        self._add(node.target)

    def visit_AugAssign(self, node: cst.AugAssign) -> None:
        self._add(node.target)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        self._add(node.target)

    def _add(self, target: cst.BaseExpression) -> None:
        each = [e.value for e in target.elements] if isinstance(target, (cst.Tuple, cst.List)) else [target]
        self.names.update(t.value for t in each if isinstance(t, cst.Name))


def starts_cell(statement: Any) -> bool:
    """Return whether `statement` is the first in a notebook cell."""
    comments = [line.comment.value for line in statement.leading_lines if line.comment is not None]
    return any(comment.startswith(CELL_MARK) for comment in comments)


def has_no_effect(guard: cst.Try) -> bool:
    """Return whether the ``try`` around an import only reports its failure."""
    smalls = [
        small
        for handler in guard.handlers
        for s in handler.body.body
        for small in (s.body if isinstance(s, cst.SimpleStatementLine) else [s])
    ]
    only_reports = all(
        isinstance(s, (cst.Raise, cst.Pass)) or (isinstance(s, cst.Expr) and isinstance(s.value, cst.Call))
        for s in smalls
    )
    return only_reports and not guard.orelse and not guard.finalbody
