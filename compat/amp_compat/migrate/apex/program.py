"""Analyze how a file uses ``apex.amp`` before it is rewritten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import libcst as cst
from libcst.metadata import ImportAssignment

from amp_compat.migrate.apex.calls import CannotFollowError, Initialize, arguments, read_initialize
from amp_compat.migrate.apex.parts import Backward, Block, Import, Program, Region
from amp_compat.migrate.apex.search import (
    BACKWARD,
    BACKWARD_OR_STEP,
    Uses,
    binds,
    calls_in,
    calls_of,
    gradient_readers,
    gradient_reads,
    has_no_effect,
    leaving,
    likely_reads,
    starts_cell,
    uses_model,
)
from amp_compat.migrate.bindings import Resolver
from amp_compat.migrate.tree import Parents, around


class Reader:
    """Builds the `Program` of a module.

    Args:
        module: the module.
        resolver: resolves the module's names.
        parents: libcst's parent of each node.
    """

    def __init__(self, module: cst.Module, resolver: Resolver, parents: Parents) -> None:
        self._module = module
        self._resolver = resolver
        self._parents = parents
        self._readers = gradient_readers(module)

    def read(self) -> Program | None:
        """Return the module's program, or None if it does not use apex.amp.

        Raises:
            CannotFollowError: part of the program cannot be analyzed.
        """
        collected = Uses(self._resolver)
        self._module.visit(collected)
        if not collected.uses:
            return None
        calls = [(name, self._call(node, name)) for node, name in collected.uses]
        initializers = [call for name, call in calls if name == "initialize"]
        if len(initializers) != 1:
            reason = f"amp.initialize is called {len(initializers)} times in this file; call it once"
            raise CannotFollowError(initializers[1] if initializers else collected.uses[0][0], reason)
        initialize = read_initialize(initializers[0], self._parents, self._module)
        params = [call for name, call in calls if name == "master_params"]
        backwards = [self._backward(call, initialize) for name, call in calls if name == "scale_loss"]
        states = [call for name, call in calls if name.endswith("state_dict")]
        self._check_scopes(initializers[0], params, backwards)
        losses = self._other_losses(initialize, backwards)
        self._note_other_uses(initialize, backwards)
        return Program(
            collected.uses, self._imports(collected), initialize, backwards, losses, params, states
        )

    # -- enclosing nodes ----------------------------------------------------------------------------

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the ancestors of `node`, innermost first."""
        return around(node, self._parents)

    def scope_of(self, node: cst.CSTNode) -> cst.FunctionDef | cst.Module:
        """Return the function that encloses `node`, or else the module."""
        return next(n for n in self.around(node) if isinstance(n, (cst.FunctionDef, cst.Module)))

    def class_of(self, function: cst.CSTNode) -> cst.ClassDef | None:
        """Return the class that `function` is a method of, if any."""
        outer = next(
            (n for n in self.around(function) if isinstance(n, (cst.FunctionDef, cst.ClassDef))), None
        )
        return outer if isinstance(outer, cst.ClassDef) else None

    def place_in(self, block: Block, node: cst.CSTNode) -> int | None:
        """Return the index of the statement of `block` that is or contains `node`."""
        within = {node, *self.around(node)}
        return next((i for i, statement in enumerate(block.body) if statement in within), None)

    def block_of(self, statement: cst.CSTNode) -> Block:
        """Return the block that contains `statement`.

        Raises:
            CannotFollowError: it shares a line with the header of its block.
        """
        block = self._parents[statement]
        if not isinstance(block, (cst.IndentedBlock, cst.Module)):
            raise CannotFollowError(statement, "this statement shares a line with the header of its block")
        return block

    # -- parts of the program -----------------------------------------------------------------------

    def _call(self, node: cst.CSTNode, name: str) -> cst.Call:
        parent = self._parents[node]
        if not (isinstance(parent, cst.Call) and parent.func is node):
            raise CannotFollowError(node, f"amp.{name} is used without being called")
        arguments(name, parent)
        return parent

    def _imports(self, collected: Uses) -> list[Import]:
        imports: list[Import] = []
        for node in dict.fromkeys(b.node for b in collected.bindings if isinstance(b, ImportAssignment)):
            line = self._parents[node]
            if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
                raise CannotFollowError(node, "apex.amp shares its import line with another statement")
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
                raise CannotFollowError(line, "the fallback for a missing apex may matter")
        return imports

    def _backward(self, call: cst.Call, initialize: Initialize) -> Backward:
        item = self._parents[call]
        node = self._parents[item] if isinstance(item, cst.WithItem) else None
        named = isinstance(item, cst.WithItem) and item.asname and isinstance(item.asname.name, cst.Name)
        if not isinstance(node, cst.With) or len(node.items) != 1 or not named:
            raise CannotFollowError(call, "amp.scale_loss is used outside `with ... as name:`")
        self.block_of(node)
        given = arguments("scale_loss", call)
        if given.keys() - {"delay_unscale"} != {"loss", "optimizers"}:
            raise CannotFollowError(call, "amp.scale_loss is passed more than a loss and an optimizer")
        optimizer = self._module.code_for_node(given["optimizers"])
        if isinstance(given["optimizers"], (cst.List, cst.Tuple)):
            raise CannotFollowError(call, "amp.scale_loss is passed several optimizers")
        steps = self._steps(call, optimizer)
        region = self._region(node, given["loss"], initialize)
        unscaled = self._unscale_before(node, steps)
        leaves = [] if unscaled is None else self._leaves(unscaled, steps[0])
        return Backward(node, given["loss"], optimizer, region, steps, unscaled, leaves)

    def _steps(self, call: cst.Call, optimizer: str) -> list[cst.SimpleStatementLine]:
        steps: list[cst.SimpleStatementLine] = []
        for step in calls_of(self._module, f"{optimizer}.step", self.scope_of(call)):
            line = self._parents[self._parents[step]]
            if step.args or not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
                reason = "optimizer.step() must be a separate statement without arguments"
                raise CannotFollowError(step, reason)
            self.block_of(line)
            steps.append(line)
        if not steps:
            raise CannotFollowError(call, f"the loss's function does not call {optimizer}.step()")
        return steps

    def _region(self, node: cst.With, loss: cst.BaseExpression, initialize: Initialize) -> Region:
        """Find the forward pass: from the first use of the model to the last assignment of the loss."""
        model, function = initialize.model, self.scope_of(node)
        inner = function.body if isinstance(function, cst.FunctionDef) else function
        for block in [b for b in self.around(node) if isinstance(b, (cst.IndentedBlock, cst.Module))]:
            end = self.place_in(block, node) or 0
            made = self.place_in(block, initialize.line)
            done = [i for i in range(end) if i == made or calls_in(block.body[i], BACKWARD_OR_STEP)]
            start = done[-1] + 1 if done else 0
            uses = [i for i in range(start, end) if uses_model(self._module, block.body[i], model)]
            bound = [i for i in range(start, end) if binds(block.body[i], loss)]
            if uses and bound and uses[0] <= bound[-1]:
                if any(starts_cell(s) for s in block.body[uses[0] + 1 : bound[-1] + 1]):
                    raise CannotFollowError(loss, "the forward pass for this loss spans several cells")
                return Region(block, uses[0], bound[-1])
            if block is inner:
                break
        reason = f"the function has no forward pass of {model} that computes this loss"
        raise CannotFollowError(loss, reason)

    def _unscale_before(self, node: cst.With, steps: Sequence[cst.SimpleStatementLine]) -> cst.CSTNode | None:
        """Return the first statement that needs unscaled gradients, or None."""
        found = gradient_reads(self.scope_of(node), self._readers)
        reads = [read for read in found if node not in self.around(read)]
        block = self.block_of(steps[0])
        end, backward = self.place_in(block, steps[0]), self.place_in(block, node)
        between = slice(0 if backward is None else backward + 1, end)
        reads += [read for each in block.body[between] for read in likely_reads(each)]
        if not reads:
            return None
        places = [self.place_in(block, read) for read in reads]
        known = [p for p in places if p is not None and end is not None and (backward or 0) <= p < end]
        if len(steps) > 1 or len(known) != len(reads):
            reason = "gradients are read outside the statements between the backward pass and the only step"
            raise CannotFollowError(reads[0], reason)
        beside = [read for read, place in zip(reads, places, strict=True) if place == backward]
        return self._after(node, beside) if beside else block.body[min(known)]

    def _leaves(self, unscaled: cst.CSTNode, step: cst.CSTNode) -> list[cst.CSTNode]:
        """Return the lines that leave out the step, once the gradients are unscaled."""
        block = self.block_of(step)
        places = (self.place_in(block, each) for each in (unscaled, step))
        lines = [self._parents[jump] for each in block.body[slice(*places)] for jump in leaving(each)]
        for line in lines:
            self.block_of(line)
        return lines

    def _after(self, node: cst.With, reads: Sequence[cst.CSTNode]) -> cst.CSTNode:
        """Return the statement after `node` if all `reads` follow it or are in the other branch."""
        block = self.block_of(node)
        backward = self.place_in(block, node) or 0
        for read in reads:
            place = self.place_in(block, read)
            if (place is None and self._fork(read, node) is None) or (place is not None and place < backward):
                raise CannotFollowError(read, "gradients are read here before the backward pass")
        if backward + 1 == len(block.body):
            raise CannotFollowError(reads[0], "gradients are read in one branch and scaled in another")
        return block.body[backward + 1]

    def _fork(self, one: cst.CSTNode, other: cst.CSTNode) -> cst.If | None:
        """Return the ``if`` that has `one` and `other` in different branches, or None."""
        above = [other, *self.around(other)]
        path = [one, *self.around(one)]
        fork = next(n for n in path if n in above)
        apart = path[path.index(fork) - 1] is not above[above.index(fork) - 1]
        return fork if isinstance(fork, cst.If) and apart else None

    def _other_losses(
        self, initialize: Initialize, backwards: Sequence[Backward]
    ) -> list[cst.BaseExpression]:
        """Return the losses of other branches that may run with the scaler on: the step unscales them, too.

        Raises:
            CannotFollowError: a function mixes scaled and unscaled backward passes.
        """
        guards = {initialize.enabled}  # without one of these, the scaler is off
        path = [initialize.line, *self.around(initialize.line)]
        for inner, outer in pairwise(path):
            if isinstance(outer, cst.If) and outer.body is inner:
                guards.add(self._module.code_for_node(outer.test))
        losses: list[cst.BaseExpression] = []
        for call in calls_in(self._module, BACKWARD):
            here = [b for b in backwards if self.scope_of(b.node) is self.scope_of(call)]
            if not here or any(b.node in self.around(call) for b in here):
                continue
            forks = [(b, fork) for b in here if (fork := self._fork(call, b.node)) is not None]
            if any(self._is_off(b, fork, guards) for b, fork in forks):
                continue
            loss = cst.ensure_type(call.func, cst.Attribute).value
            if not any(loss.deep_equals(b.loss) for b, _ in forks):
                raise CannotFollowError(call, "this backward pass runs on a loss that is not scaled")
            losses.append(loss)
        return losses

    def _is_off(self, backward: Backward, fork: cst.If, guards: set[str]) -> bool:
        """Return whether the scaler is off in the branch of `fork` that does not scale the loss."""
        scales = fork.body in self.around(backward.node)
        return scales and self._module.code_for_node(fork.test) in guards

    def _note_other_uses(self, initialize: Initialize, backwards: Sequence[Backward]) -> None:
        inside = [s for b in backwards for s in b.region.block.body[b.region.first : b.region.last + 1]]
        for call in calls_of(self._module, initialize.model, self._module):
            if not any(statement in inside for statement in self.around(call)):
                called = f"{initialize.model}(...)"
                initialize.notes.append(f"elsewhere {called} runs in float32 unless you wrap it in autocast")
                return

    def _check_scopes(
        self, first: cst.Call, params: Sequence[cst.Call], backwards: Sequence[Backward]
    ) -> None:
        """Check that steps and gradient reads share the function of their backward pass."""
        if not backwards:
            raise CannotFollowError(first, "no loss is scaled in this file")
        scopes = {(b.optimizer, self.scope_of(b.node)) for b in backwards}
        if len({optimizer for optimizer, _ in scopes}) > 1:
            raise CannotFollowError(backwards[1].node, "more than one optimizer shares the scaler")
        for step in calls_of(self._module, f"{backwards[0].optimizer}.step", self._module):
            if (backwards[0].optimizer, self.scope_of(step)) not in scopes:
                raise CannotFollowError(step, "this step is outside the function of the backward pass")
        for call in params:
            optimizer = self._module.code_for_node(arguments("master_params", call)["optimizer"])
            if (optimizer, self.scope_of(call)) not in scopes:
                raise CannotFollowError(call, f"another function computes the gradients of {optimizer}")
