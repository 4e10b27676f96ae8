"""Rewrite the blocks of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import libcst as cst

from amp_compat.migrate.apex.parts import Block

Lines = list[Any]


def comments_of(lines: Iterable[Any]) -> Lines:
    """Return the comments of `lines` as separate lines."""
    return [cst.EmptyLine(comment=line.comment) for line in lines if line.comment is not None]


def _comments_at_end(statement: cst.CSTNode) -> Lines:
    """Return the comments after the last statement of a ``with`` block."""
    block = statement.body if isinstance(statement, cst.With) else None
    return comments_of(block.footer) if isinstance(block, cst.IndentedBlock) else []


class Write(cst.CSTTransformer):
    """Rewrites each block: replaces and adds statements, and wraps them in regions."""

    def __init__(
        self,
        replace: Mapping[cst.CSTNode, Callable[[Any], Lines]],
        before: Mapping[cst.CSTNode, Lines],
        expressions: Mapping[cst.CSTNode, str],
        regions: Mapping[tuple[Block, int], int],
        header: str,
    ) -> None:
        super().__init__()
        self._replace, self._before = replace, before
        self._expressions, self._regions = expressions, regions
        self._header = header

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Replace an expression, or the statements of a block."""
        if original_node in self._expressions:
            return cst.parse_expression(self._expressions[original_node])
        updated: Any = super().on_leave(original_node, updated_node)
        if isinstance(original_node, (cst.IndentedBlock, cst.Module)):
            body, comments = self._statements(original_node, updated.body)
            return updated.with_changes(body=body, footer=[*comments, *updated.footer])
        return updated

    def _statements(self, block: Block, updated: Any) -> tuple[Lines, Lines]:
        """Return the statements of a block and its remaining trailing comments."""
        written: Lines = []
        region: Lines = []
        last, comments = -1, []
        for place, (old, new) in enumerate(zip(block.body, updated, strict=True)):
            lines = self._replace[old](new) if old in self._replace else [new]
            if not lines:
                comments += comments_of(new.leading_lines)
                continue
            lines = self._led([*self._before.get(old, ()), *lines], comments, new)
            comments = _comments_at_end(new) if old in self._replace else []
            last = self._regions.get((block, place), last)
            (region if place <= last else written).extend(lines)
            if place == last:
                written.append(self._with(region))
                region = []
        return written or [cst.parse_statement("pass")], comments

    def _led(self, lines: Lines, comments: Lines, old: Any) -> Lines:
        """Move a statement's leading comments above the lines inserted before it."""
        first, *rest = lines
        if rest and first is not old and rest[-1] is old:
            lead = old.leading_lines
            if isinstance(old, (cst.FunctionDef, cst.ClassDef)):  # its comments stay with it
                lead = [line for line in lead if line.comment is None]
            else:
                rest[-1] = old.with_changes(leading_lines=())
            first = first.with_changes(leading_lines=lead)
        return [first.with_changes(leading_lines=[*comments, *first.leading_lines]), *rest]

    def _with(self, lines: Lines) -> cst.With:
        first, *rest = lines
        body = [first.with_changes(leading_lines=()), *rest]
        item = cst.WithItem(cst.parse_expression(self._header))
        return cst.With([item], cst.IndentedBlock(body), leading_lines=first.leading_lines)
