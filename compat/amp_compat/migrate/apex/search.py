"""Syntax-tree queries for rewriting ``apex.amp``."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, cast

import libcst as cst
from libcst import matchers as m
from libcst.helpers import get_full_name_for_node
from libcst.metadata import BaseAssignment

from amp_compat.migrate.apex.calls import CannotFollowError
from amp_compat.migrate.bindings import Resolved, Resolver
from amp_compat.migrate.model import CELL_MARK
from amp_compat.migrate.tree import NameWalker


class Uses(NameWalker):
    """Collects expressions that resolve to a name in ``apex.amp``."""

    def __init__(self, resolver: Resolver) -> None:
        super().__init__()
        self._resolver = resolver
        self.uses: list[tuple[cst.CSTNode, str]] = []
        self.bindings: list[BaseAssignment] = []

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:  # libcst's name
        """Refuse an assignment for programs without apex, such as ``amp = None``."""
        if isinstance(node.target, cst.Name) and self._resolved(node.target) is not None:
            raise CannotFollowError(
                node,
                f"`{node.target.value}` is also assigned here: remove this, and the checks for it, first",
            )

    def _resolved(self, node: cst.BaseExpression) -> Resolved | None:
        resolved = self._resolver.resolve(node)
        is_ours = resolved is not None and f"{resolved.dotted}.".startswith("apex.amp.")
        return resolved if is_ours else None

    def take(self, node: cst.BaseExpression) -> bool:
        """Record a use, and the binding of its first name."""
        resolved = self._resolved(node)
        if resolved is None:
            return False
        if resolved.conflict or resolved.dotted == "apex.amp":
            raise CannotFollowError(node, resolved.conflict or "the module apex.amp is used as an object")
        self.uses.append((node, resolved.dotted[len("apex.amp.") :]))
        self.bindings.extend(resolved.bindings)
        return True


_READER = m.Name(m.MatchIfTrue(lambda name: name == "master_params" or "clip_grad" in name))
_READS = m.Attribute(attr=m.Name("grad") | _READER) | m.Call(func=_READER)
_LIKELY = re.compile(r"(?:^|_)grad(?:s|ients?)?(?:_|$)")
_UNLIKELY = re.compile(r"zero|no_grad|requires|enable|retain|accum|checkpoint|toggle")


def gradient_reads(within: cst.CSTNode, readers: Collection[str]) -> Sequence[cst.CSTNode]:
    """Return the code that reads gradients: ``.grad``, ``clip_grad...``, ``amp.master_params``, `readers`."""
    called: Any = m.MatchIfTrue(lambda func: get_full_name_for_node(func) in readers)
    return m.findall(within, _READS | m.Call(func=called))


def likely_reads(within: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """Return the calls of functions that read gradients by their name, such as ``plot_grad_flow``."""
    name = m.Name(m.MatchIfTrue(lambda name: bool(_LIKELY.search(name)) and not _UNLIKELY.search(name)))
    return m.findall(within, m.Call(func=name | m.Attribute(attr=name)))


def gradient_readers(module: cst.Module) -> set[str]:
    """Return the names that `module` binds to functions that read gradients."""
    functions: dict[str, list[cst.CSTNode]] = defaultdict(list)
    bound = m.FunctionDef() | m.Assign([m.AssignTarget(m.Name())]) | m.ImportAlias(asname=m.AsName())
    for node in m.findall(module, bound | m.ClassDef()):
        if isinstance(node, cst.ClassDef):
            for method in (s for s in node.body.body if isinstance(s, cst.FunctionDef)):
                for base in ("self", "cls", node.name.value):
                    functions[f"{base}.{method.name.value}"].append(method.body)
        elif isinstance(node, cst.FunctionDef):
            functions[node.name.value].append(node.body)
        elif isinstance(node, cst.ImportAlias):
            functions[node.evaluated_alias or ""].append(cst.Call(node.name))
        elif isinstance(node, cst.Assign) and not m.matches(node.value, m.Call() & ~_PARTIAL):
            functions[cst.ensure_type(node.targets[0].target, cst.Name).value] += _called(node.value)
    readers: set[str] = set()
    while found := {n for n in functions.keys() - readers if _read(functions[n], readers)}:
        readers |= found
    return readers


_PARTIAL = m.Call(func=m.Name("partial") | m.Attribute(attr=m.Name("partial")))


def _called(value: cst.BaseExpression) -> list[cst.CSTNode]:
    """Return what calls of a name that is bound to `value` run."""
    if isinstance(value, cst.Call):  # a partial
        return [cst.Call(arg.value) for arg in value.args[:1]]
    return [value if isinstance(value, cst.Lambda) else cst.Call(value)]


def _read(bodies: Sequence[cst.CSTNode], readers: Collection[str]) -> bool:
    return any(gradient_reads(body, readers) for body in bodies)


def leaving(node: cst.CSTNode, *, in_loop: bool = False) -> list[cst.CSTNode]:
    """Return the ``continue``, ``break`` and ``return`` in `node` that leave the block around it."""
    if isinstance(node, cst.FunctionDef):
        return []
    if isinstance(node, cst.Return) or (isinstance(node, (cst.Continue, cst.Break)) and not in_loop):
        return [node]
    in_loop = in_loop or isinstance(node, (cst.For, cst.While))
    return [jump for child in node.children for jump in leaving(child, in_loop=in_loop)]


_ANY = m.Call()
BACKWARD = m.Call(m.Attribute(attr=m.Name("backward")))
BACKWARD_OR_STEP = m.Call(m.Attribute(attr=m.Name("backward") | m.Name("step")))


def calls_in(within: cst.CSTNode, which: m.Call = _ANY) -> list[cst.Call]:
    """Return the calls in `within`."""
    return cast("list[cst.Call]", m.findall(within, which))


def calls_of(module: cst.Module, function: str, within: cst.CSTNode) -> list[cst.Call]:
    """Return the calls in `within` whose callee reads exactly `function`."""
    return [call for call in calls_in(within) if module.code_for_node(call.func) == function]


def uses_model(module: cst.Module, statement: cst.CSTNode, model: str) -> bool:
    """Return whether `statement` calls the model or passes it to a call."""
    if isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
        return False
    calls = calls_in(statement)
    called = {module.code_for_node(call.func) for call in calls}
    passed = {module.code_for_node(arg.value) for call in calls for arg in call.args}
    return bool(called & {model, f"{model}.forward", f"{model}.module"}) or model in passed


def binds(statement: cst.CSTNode, loss: cst.BaseExpression) -> bool:
    """Return whether `statement`, or one nested in it, assigns to the name `loss`."""
    if not isinstance(loss, cst.Name) or isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
        return False
    name = m.Name(loss.value)
    among: Any = [m.ZeroOrMore(), m.Element(name) | m.StarredElement(name), m.ZeroOrMore()]
    target = name | m.Tuple(among) | m.List(among)
    return bool(m.findall(statement, m.AssignTarget(target) | m.AugAssign(target) | m.AnnAssign(target)))


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
