"""What a file does with ``apex.amp``, where all of it can be followed: the ground for a rewrite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import ImportAssignment

from amp_compat.migrate.apex.calls import CannotFollowError, Initialize, arguments, read_initialize
from amp_compat.migrate.apex.search import (
    Looks,
    Uses,
    backward_calls,
    begins_a_cell,
    binds,
    calls_of,
    goes_back,
    has_no_effect,
    uses_model,
)
from amp_compat.migrate.bindings import Resolver

Block = cst.IndentedBlock | cst.Module
Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
Parents = Mapping[cst.CSTNode, cst.CSTNode]


@dataclass
class Region:
    """The statements that run under autocast: of `block`, from `first` to `last`, which binds the loss."""

    block: Block
    first: int
    last: int


@dataclass
class Backward:
    """``with amp.scale_loss(loss, optimizer) as scaled: ...``, and what belongs to it in its function.

    Attributes:
        node: the statement.
        loss: what is scaled.
        optimizer: the code of whose step follows.
        region: the forward pass that makes the loss.
        steps: the statements ``optimizer.step()``.
        looks: the first statement ahead of the step that looks at gradients, or None.
    """

    node: cst.With
    loss: cst.BaseExpression
    optimizer: str
    region: Region
    steps: list[cst.SimpleStatementLine]
    looks: cst.CSTNode | None


@dataclass
class Import:
    """A statement that is there for ``apex.amp``, and goes; `others`: it imports more, which stays."""

    statement: cst.CSTNode
    others: bool = False


@dataclass
class Program:
    """Every use of ``apex.amp`` in a file, by what it does."""

    uses: list[tuple[cst.CSTNode, str]]
    imports: list[Import]
    initialize: Initialize
    backwards: list[Backward]
    params: list[cst.Call]
    states: list[cst.Call]


class Reader:
    """Reads a program from a module.

    Args:
        module: the module.
        resolver: of its names.
        parents: libcst's parents, per node.
    """

    def __init__(self, module: cst.Module, resolver: Resolver, parents: Parents) -> None:
        self._module = module
        self._resolver = resolver
        self._parents = parents

    def read(self) -> Program | None:
        """Return what the module does with apex.amp; None if nothing.

        Raises:
            CannotFollowError: not all of it can be followed.
        """
        found = Uses(self._resolver)
        self._module.visit(found)
        if not found.uses:
            return None
        calls = [(name, self._call(node, name)) for node, name in found.uses]
        first = [call for name, call in calls if name == "initialize"]
        if len(first) != 1:
            reason = f"amp.initialize is called {len(first)} times in this file; once is what can be followed"
            raise CannotFollowError(first[1] if first else found.uses[0][0], reason)
        initialize = read_initialize(first[0], self._parents, self._module)
        params = [call for name, call in calls if name == "master_params"]
        backwards = [self._backward(call, initialize) for name, call in calls if name == "scale_loss"]
        states = [call for name, call in calls if name.endswith("state_dict")]
        self._check_scopes(first[0], params, backwards)
        self._check_losses([b.node for b in backwards])
        self._note_other_uses(initialize, backwards)
        return Program(found.uses, self._imports(found), initialize, backwards, params, states)

    # -- where things stand -------------------------------------------------------------------------

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield what `node` stands in, from the inside out."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def scope_of(self, node: cst.CSTNode) -> cst.FunctionDef | cst.Module:
        """Return the function, or else the module, that `node` stands in."""
        return next(n for n in self.around(node) if isinstance(n, (cst.FunctionDef, cst.Module)))

    def class_of(self, function: cst.CSTNode) -> cst.ClassDef | None:
        """Return the class that `function` is a method of."""
        outer = next(
            (n for n in self.around(function) if isinstance(n, (cst.FunctionDef, cst.ClassDef))), None
        )
        return outer if isinstance(outer, cst.ClassDef) else None

    def place_in(self, block: Block, node: cst.CSTNode) -> int | None:
        """Return the index of the statement of `block` that `node` is or stands in."""
        within = {node, *self.around(node)}
        return next((i for i, statement in enumerate(block.body) if statement in within), None)

    def block_of(self, statement: cst.CSTNode) -> Block:
        """Return the block that `statement` is one of.

        Raises:
            CannotFollowError: it stands behind a colon, on the same line.
        """
        block = self._parents[statement]
        if not isinstance(block, (cst.IndentedBlock, cst.Module)):
            raise CannotFollowError(statement, "this stands on one line with what it belongs to")
        return block

    # -- the parts ----------------------------------------------------------------------------------

    def _call(self, node: cst.CSTNode, name: str) -> cst.Call:
        parent = self._parents[node]
        if not (isinstance(parent, cst.Call) and parent.func is node):
            raise CannotFollowError(node, f"amp.{name} is used without being called")
        arguments(name, parent)
        return parent

    def _imports(self, found: Uses) -> list[Import]:
        imports: list[Import] = []
        for node in dict.fromkeys(b.node for b in found.bindings if isinstance(b, ImportAssignment)):
            line = self._parents[node]
            if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
                raise CannotFollowError(node, "apex.amp is imported on one line with something else")
            block = self.block_of(line)
            guard = self._parents.get(block)
            if (
                isinstance(node, cst.ImportFrom)
                and not isinstance(node.names, cst.ImportStar)
                and len(node.names) > 1
            ):
                imports.append(Import(line, others=True))
            elif not isinstance(guard, cst.Try) or len(block.body) > 1:
                imports.append(Import(line))
            elif has_no_effect(guard):
                imports.append(Import(guard))
            else:
                raise CannotFollowError(line, "what is done where apex cannot be imported may matter")
        return imports

    def _backward(self, call: cst.Call, initialize: Initialize) -> Backward:
        item = self._parents[call]
        node = self._parents[item] if isinstance(item, cst.WithItem) else None
        named = isinstance(item, cst.WithItem) and item.asname and isinstance(item.asname.name, cst.Name)
        if not isinstance(node, cst.With) or len(node.items) != 1 or not named:
            raise CannotFollowError(call, "amp.scale_loss stands elsewhere than in `with ... as name:`")
        self.block_of(node)
        given = arguments("scale_loss", call)
        if given.keys() - {"delay_unscale"} != {"loss", "optimizers"}:
            raise CannotFollowError(call, "amp.scale_loss is passed more than a loss and an optimizer")
        optimizer = self._module.code_for_node(given["optimizers"])
        if isinstance(given["optimizers"], (cst.List, cst.Tuple)):
            raise CannotFollowError(call, "amp.scale_loss is passed several optimizers")
        steps = self._steps(call, optimizer)
        region = self._region(node, given["loss"], initialize.model)
        return Backward(node, given["loss"], optimizer, region, steps, self._looks(node, steps))

    def _steps(self, call: cst.Call, optimizer: str) -> list[cst.SimpleStatementLine]:
        steps: list[cst.SimpleStatementLine] = []
        for step in calls_of(self._module, f"{optimizer}.step", self.scope_of(call)):
            line = self._parents[self._parents[step]]
            if step.args or not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
                reason = "only a step() that is passed nothing, and is a statement, can become two"
                raise CannotFollowError(step, reason)
            self.block_of(line)
            steps.append(line)
        if not steps:
            raise CannotFollowError(call, f"no {optimizer}.step() is found in the function of its loss")
        return steps

    def _region(self, node: cst.With, loss: cst.BaseExpression, model: str) -> Region:
        """Find the forward pass: from the first use of the model to where the loss is bound last."""
        function = self.scope_of(node)
        inner = function.body if isinstance(function, cst.FunctionDef) else function
        for block in [b for b in self.around(node) if isinstance(b, (cst.IndentedBlock, cst.Module))]:
            end = self.place_in(block, node) or 0
            done = [i for i in range(end) if goes_back(block.body[i])]
            start = done[-1] + 1 if done else 0
            uses = [i for i in range(start, end) if uses_model(self._module, block.body[i], model)]
            bound = [i for i in range(start, end) if binds(block.body[i], loss)]
            if uses and bound and uses[0] <= bound[-1]:
                if any(begins_a_cell(s) for s in block.body[uses[0] + 1 : bound[-1] + 1]):
                    raise CannotFollowError(loss, "the forward pass that makes this loss is in several cells")
                return Region(block, uses[0], bound[-1])
            if block is inner:
                break
        reason = f"no forward pass of {model} that makes this loss is found ahead of it in the function"
        raise CannotFollowError(loss, reason)

    def _looks(self, node: cst.With, steps: Sequence[cst.SimpleStatementLine]) -> cst.CSTNode | None:
        """Return the statement from which on gradients are looked at, and so must be unscaled."""
        seen = Looks()
        self.scope_of(node).visit(seen)
        looks = [look for look in seen.found if node not in self.around(look)]
        if not looks:
            return None
        block, end = self.block_of(steps[0]), self.place_in(self.block_of(steps[0]), steps[0])
        places = [self.place_in(block, look) for look in looks]
        back = self.place_in(block, node)
        known = [p for p in places if p is not None and end is not None and (back or 0) <= p < end]
        if len(steps) > 1 or len(known) != len(looks):
            reason = "gradients are looked at elsewhere than between the backward pass and the one step"
            raise CannotFollowError(looks[0], reason)
        beside = [look for look, place in zip(looks, places, strict=True) if place == back]
        return self._after(node, beside) if beside else block.body[min(known)]

    def _after(self, node: cst.With, looks: Sequence[cst.CSTNode]) -> cst.CSTNode:
        """Return the statement after `node`, if all of `looks` come after it or are in the other branch."""
        block = self.block_of(node)
        back = self.place_in(block, node) or 0
        for look in looks:
            place = self.place_in(block, look)
            if (place is None and not self._in_other_branch(look, node)) or (
                place is not None and place < back
            ):
                raise CannotFollowError(look, "gradients are looked at here, ahead of the backward pass")
        if back + 1 == len(block.body):
            raise CannotFollowError(looks[0], "gradients are looked at in one branch, and scaled in another")
        return block.body[back + 1]

    def _in_other_branch(self, one: cst.CSTNode, other: cst.CSTNode) -> bool:
        above = [other, *self.around(other)]
        path = [one, *self.around(one)]
        fork = next(n for n in path if n in above)
        return isinstance(fork, cst.If) and path[path.index(fork) - 1] is not above[above.index(fork) - 1]

    def _check_losses(self, scaled: Sequence[cst.With]) -> None:
        """See that no loss goes back unscaled beside one that is scaled."""
        for call in backward_calls(self._module):
            here = [node for node in scaled if self.scope_of(node) is self.scope_of(call)]
            inside = any(node in self.around(call) for node in here)
            if here and not inside and not any(self._in_other_branch(call, node) for node in here):
                raise CannotFollowError(call, "a loss goes back here that is not scaled")

    def _note_other_uses(self, initialize: Initialize, backwards: Sequence[Backward]) -> None:
        inside = [s for b in backwards for s in b.region.block.body[b.region.first : b.region.last + 1]]
        for call in calls_of(self._module, initialize.model, self._module):
            if not any(statement in inside for statement in self.around(call)):
                called = f"{initialize.model}(...)"
                initialize.notes.append(
                    f"elsewhere {called} runs in float32, unless you put a region around it"
                )
                return

    def _check_scopes(
        self, first: cst.Call, params: Sequence[cst.Call], backwards: Sequence[Backward]
    ) -> None:
        """See that the steps, and the looks at gradients, are in the functions of the backward passes."""
        if not backwards:
            raise CannotFollowError(first, "no loss is scaled in this file")
        scopes = {(b.optimizer, self.scope_of(b.node)) for b in backwards}
        if len({optimizer for optimizer, _ in scopes}) > 1:
            raise CannotFollowError(backwards[1].node, "more than one optimizer shares the scaler")
        for step in calls_of(self._module, f"{backwards[0].optimizer}.step", self._module):
            if (backwards[0].optimizer, self.scope_of(step)) not in scopes:
                raise CannotFollowError(step, "a step is taken outside of the function of the backward pass")
        for call in params:
            optimizer = self._module.code_for_node(arguments("master_params", call)["optimizer"])
            if (optimizer, self.scope_of(call)) not in scopes:
                raise CannotFollowError(call, f"the gradients of {optimizer} are made in another function")
