"""Helpers for syntax trees."""

from __future__ import annotations

import ast
import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import libcst as cst
from libcst import matchers as m
from libcst.metadata import (
    CodeRange,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    Scope,
    ScopeProvider,
)

from amp_compat.migrate.calls import CannotConvertError

Parents = Mapping[cst.CSTNode, cst.CSTNode]
Edit = Callable[[cst.CSTNode], Any]  # a replacement node, several nodes, or a removal


class Apply(cst.CSTTransformer):
    """Applies edits bottom-up, so nested edits are kept, and so are the comments above a removed line."""

    def __init__(self, edits: Mapping[cst.CSTNode, Edit]) -> None:
        super().__init__()
        self._edits = edits
        self._removed: list[cst.SimpleStatementLine] = []
        """Lines that stay until their block is left, for the comments above them."""

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        """Apply the edit of a node after those of its children."""
        updated = super().on_leave(original_node, updated_node)
        edit = self._edits.get(original_node)
        result = edit(updated) if edit is not None and isinstance(updated, cst.CSTNode) else updated
        if result is cst.RemovalSentinel.REMOVE and _has_comment_above(updated):
            self._removed.append(updated)
            return updated
        if isinstance(result, (cst.IndentedBlock, cst.Module)) and self._removed:
            return self._without_removed(result)
        return result  # type: ignore[return-value]

    def _without_removed(self, block: cst.IndentedBlock | cst.Module) -> cst.CSTNode:
        """Move what is above each removed line to the next one, or to the end of the block."""
        body: list[Any] = []
        above: list[Any] = []
        for line in cast("Sequence[Any]", block.body):
            if any(line is removed for removed in self._removed):
                above += line.leading_lines
                continue
            body.append(line.with_changes(leading_lines=[*above, *line.leading_lines]) if above else line)
            above = []
        return block.with_changes(body=body, footer=[*above, *block.footer])


def _has_comment_above(line: object) -> TypeGuard[cst.SimpleStatementLine]:
    return isinstance(line, cst.SimpleStatementLine) and any(each.comment for each in line.leading_lines)


class NameWalker(cst.CSTVisitor):
    """Calls `take` for each used name and attribute chain, longest first."""

    @abstractmethod
    def take(self, node: cst.BaseExpression) -> bool:
        """Return whether `node` matches; its parts are then skipped."""

    def visit_Import(self, node: cst.Import) -> bool | None:
        """Skip imports: they are not uses."""
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool | None:
        """Skip imports: they are not uses."""
        return False

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        """Offer the whole chain, then its first part; the words after a dot are not names."""
        if not self.take(node):
            node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        """Visit the value only: a keyword is not a name."""
        node.value.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        """Offer a bare name."""
        self.take(node)


class Metadata(NamedTuple):
    """What libcst knows of the nodes of a module.

    Attributes:
        parents: the parent of each.
        positions: where each is in the source.
        scopes: the scope of each, where it has one.
    """

    parents: Parents
    positions: Mapping[cst.CSTNode, CodeRange]
    scopes: Mapping[cst.CSTNode, Scope | None]


def metadata_of(module: cst.Module) -> Metadata:
    """Return the metadata of the nodes of `module` itself, not of a copy."""
    providers = [ParentNodeProvider, PositionProvider, ScopeProvider]
    resolved: Any = MetadataWrapper(module, unsafe_skip_copy=True).resolve_many(providers)
    metadata = Metadata(*(resolved[provider] for provider in providers))
    for node, scope in metadata.scopes.items():
        captured = _captured(node)
        if captured is not None and scope is not None:  # libcst knows no names that patterns bind
            scope.record_assignment(captured.value, node)
    return metadata


def _captured(node: cst.CSTNode) -> cst.Name | None:
    if isinstance(node, (cst.MatchAs, cst.MatchStar)):
        return node.name
    return node.rest if isinstance(node, cst.MatchMapping) else None


def around(node: cst.CSTNode, parents: Parents) -> Iterator[cst.CSTNode]:
    """Yield the ancestors of `node`, innermost first."""
    while node in parents:
        node = parents[node]
        yield node


def args_of(node: cst.CSTNode) -> list[cst.Arg]:
    """Return the arguments of a call."""
    assert isinstance(node, cst.Call)
    return list(node.args)


def root_of(node: cst.BaseExpression) -> cst.BaseExpression:
    """Return the first name of an attribute chain, also through ``getattr(x, "name")``."""
    while True:
        if isinstance(node, cst.Attribute):
            node = node.value
        elif isinstance(node, cst.Call):
            node = node.args[0].value
        else:
            return node


_SUPER_INIT = m.Call(m.Attribute(m.Call(m.Name("super")), m.Name("__init__")))


def super_init(node: cst.ClassDef) -> cst.Call:
    """Return the only call of ``super().__init__`` in the class's own ``__init__``."""
    own = [s for s in node.body.body if isinstance(s, cst.FunctionDef) and s.name.value == "__init__"]
    calls = [call for function in own for call in m.findall(function, _SUPER_INIT)]
    if own and len(calls) != 1:
        raise CannotConvertError(
            f"class {node.name.value} does not call super().__init__ once: pass the device first where it "
            "calls this constructor, then change the base"
        )
    if not own:
        raise CannotConvertError(
            f"class {node.name.value} inherits the constructor, which now takes the device first: "
            "callers must pass it"
        )
    return cast("cst.Call", calls[0])


def dunder_all(module: cst.Module, text: str) -> set[str]:
    """Return the words of the strings in the statements that name ``__all__``; extra words are harmless."""
    if "__all__" not in text:
        return set()
    statements = m.findall(module, m.Assign() | m.AnnAssign() | m.AugAssign() | m.Expr())
    naming = [statement for statement in statements if m.findall(statement, m.Name("__all__"))]
    strings = [string for statement in naming for string in m.findall(statement, m.SimpleString())]
    return {word for string in strings for word in re.findall(r"\w+", cast("cst.SimpleString", string).value)}


_TYPE_COMMENT = re.compile(r"#\s*type:.*\btorch\.(?:cuda|cpu)\.amp\b.*")


def type_comments(module: cst.Module, text: str) -> list[cst.Comment]:
    """Return the comments that give a deprecated name as a type."""
    if not _TYPE_COMMENT.search(text):
        return []
    comments = m.findall(module, m.Comment(m.MatchRegex(_TYPE_COMMENT)))
    return [cast("cst.Comment", comment) for comment in comments]


def syntax_error(text: str) -> Exception | None:
    """Return why Python cannot parse `text`, or None. Its warnings, as of invalid escapes, are dropped."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError) as error:
        return error
    return None


def quote_of(text: str) -> str:
    """Return the quotation mark that `text` uses most."""
    return "'" if text.count("'") > text.count('"') else '"'


def quote_at(node: cst.CSTNode, parents: Parents, usual: str) -> str:
    """Return the quotation mark `usual`, or one that the f-strings around `node` do not use."""
    strings = [n.quote for n in around(node, parents) if isinstance(n, cst.FormattedString)]
    marks = [usual, '"', "'"]
    free = [mark for mark in marks if mark not in "".join(strings)]
    free += [mark for mark in marks if mark not in strings]
    if not free:
        raise CannotConvertError(
            "the f-strings around it use both quotation marks; move the call out of them"
        )
    return free[0]
