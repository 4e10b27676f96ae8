"""The parts of a program that uses ``apex.amp``."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from amp_compat.migrate.apex.calls import Initialize

Block = cst.IndentedBlock | cst.Module


@dataclass
class Region:
    """Statements `first` to `last` of `block`, which run under autocast; `last` binds the loss."""

    block: Block
    first: int
    last: int


@dataclass
class Backward:
    """``with amp.scale_loss(loss, optimizer) as scaled: ...`` and the related code in its function.

    Attributes:
        node: the statement.
        loss: the loss expression.
        optimizer: source code of the optimizer.
        region: the forward pass that computes the loss.
        steps: the statements ``optimizer.step()``.
        unscale_before: the first statement that reads gradients before the step, or None.
        leaves: the lines after it that leave out the step.
    """

    node: cst.With
    loss: cst.BaseExpression
    optimizer: str
    region: Region
    steps: list[cst.SimpleStatementLine]
    unscale_before: cst.CSTNode | None
    leaves: list[cst.CSTNode]


@dataclass
class Import:
    """An ``apex.amp`` import to remove; with `others`, the statement's other names stay."""

    statement: cst.CSTNode
    others: bool = False


@dataclass
class Program:
    """Every use of ``apex.amp`` in a file, grouped by purpose; `losses` are others that must be scaled."""

    uses: list[tuple[cst.CSTNode, str]]
    imports: list[Import]
    initialize: Initialize
    backwards: list[Backward]
    losses: list[cst.BaseExpression]
    params: list[cst.Call]
    states: list[cst.Call]
