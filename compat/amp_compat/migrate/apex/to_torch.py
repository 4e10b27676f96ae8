"""Rewrite programs from ``apex.amp`` to ``torch.amp``, one whole file at a time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import libcst as cst
from libcst import matchers

from amp_compat.migrate.apex.calls import ApexFinding, CannotFollowError
from amp_compat.migrate.apex.parts import Backward, Program
from amp_compat.migrate.apex.program import Reader
from amp_compat.migrate.apex.write import Lines, Write, comments_of
from amp_compat.migrate.bindings import Resolver
from amp_compat.migrate.imports import ImportEditor, bound_names
from amp_compat.migrate.model import Finding, Level
from amp_compat.migrate.names import Target
from amp_compat.migrate.stars import star_names
from amp_compat.migrate.tree import metadata_of

_NAMES = ("scaler", "grad_scaler", "amp_scaler", "torch_amp_scaler")


class _Scaler(NamedTuple):
    """The scaler's name and constructor call, and the autocast call of its regions."""

    name: str
    is_global: bool
    may_be_off: bool
    constructor: str
    region: str


def apex_to_torch(text: str, target: Target, quote: str) -> tuple[str, list[Finding]] | None:
    """Rewrite a program that uses apex.amp, or return None if it does not.

    Raises:
        CannotRewriteError: part of it cannot be rewritten without changing its meaning.
    """
    module = cst.parse_module(text)
    parents, positions, scopes = metadata_of(module)

    def find(node: cst.CSTNode, level: Level, name: str, message: str) -> Finding:
        start = positions[node].start
        return Finding(start.line, start.column, level, name, message)

    reader = Reader(module, Resolver(scopes, parents, star_names(module)), parents)
    try:
        program = reader.read()
        if program is None:
            return None
        rewriter = _Rewriter(module, program, reader, quote)
        return rewriter.rewrite(target), [find(*finding) for finding in rewriter.findings()]
    except CannotFollowError as error:
        raise CannotRewriteError(find(error.node, "manual", "apex.amp", f"{error}; {_AS_A_WHOLE}")) from error


_AS_A_WHOLE = "apex.amp was left unchanged throughout the file"


class CannotRewriteError(Exception):
    """The program cannot be rewritten; `finding` says where and why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


class _Rewriter:
    """Rewrites a program to torch.amp.

    Args:
        module: the module that the program was read from.
        program: its uses of apex.amp.
        reader: finds enclosing scopes and blocks.
        quote: the quotation mark that the file uses.
    """

    def __init__(self, module: cst.Module, program: Program, reader: Reader, quote: str) -> None:
        self._module = module
        self._program = program
        self._reader = reader
        self._quote = quote
        self._replace: dict[cst.CSTNode, Callable[[Any], Lines]] = {}
        self._before: dict[cst.CSTNode, Lines] = defaultdict(list)
        self._unscaled: set[cst.CSTNode] = set()
        self._expressions: dict[cst.CSTNode, str] = {}
        self._scaler = self._choose()

    def rewrite(self, target: Target) -> str:
        """Return the rewritten source of the module."""
        scaler, first = self._scaler, self._program.initialize
        for one in self._program.imports:
            self._replace[one.statement] = _without_amp if one.others else lambda _: []
        self._replace[first.line] = lambda line: [_line(f"{scaler.name} = {scaler.constructor}", line)]
        self._define_when_off()
        for backward in self._program.backwards:
            self._write(backward)
        for loss in self._program.losses:
            self._expressions[loss] = f"{scaler.name}.scale({self._module.code_for_node(loss)})"
        for call in self._program.params:
            optimizer = self._module.code_for_node(call.args[0].value)
            groups = f"{optimizer}.param_groups"
            params = f"(p for group in {groups} for p in group[{self._quote}params{self._quote}])"
            self._expressions[call] = params
        for call in self._program.states:
            assert isinstance(call.func, (cst.Attribute, cst.Name))
            name = call.func.attr.value if isinstance(call.func, cst.Attribute) else call.func.value
            self._expressions[call.func] = f"{scaler.name}.{name}"
        regions = {(b.region.block, b.region.first): b.region.last for b in self._program.backwards}
        writer = Write(self._replace, self._before, self._expressions, regions, scaler.region)
        new = self._module.visit(writer)
        assert isinstance(new, cst.Module)
        imports = ImportEditor(new, target, {})
        if "torch" not in bound_names(new):
            imports.need("torch")
        return imports.add_to(new).code

    def findings(self) -> list[ApexFinding]:
        """Return the findings, one per use."""
        name = self._scaler.name
        messages = {
            "initialize": f"{name} = torch.amp.GradScaler(...); the forward pass runs under autocast",
            "scale_loss": f"{name}.scale(loss).backward(), {name}.step(optimizer), {name}.update()",
            "master_params": f"{name}.unscale_(optimizer), then the parameters in its groups",
            "state_dict": f"{name}.state_dict()",
        }
        findings: list[ApexFinding] = []
        for node, use in self._program.uses:
            notes = self._program.initialize.notes if use == "initialize" else ()
            if use == "load_state_dict":
                notes = ["states saved by apex use different keys: see amp_core.convert_scaler_state"]
            message = "; ".join([messages.get(use, f"{name}.{use}(...)"), *notes])
            findings.append((node, "review" if notes else "changed", f"apex.amp.{use}", message))
        return findings

    def _choose(self) -> _Scaler:
        first = self._program.initialize
        text = self._module.code
        free = next(n for n in (*_NAMES, "_scaler_of_torch_amp") if not re.search(rf"\b{n}\b", text))
        home = self._reader.scope_of(first.line)
        nodes = [node for node, _ in self._program.uses]
        scopes = {self._reader.scope_of(node) for node in nodes}
        classes = {self._reader.class_of(scope) for scope in {home, *scopes}}
        together = isinstance(home, cst.Module) or scopes == {home}
        own = not together and None not in classes and len(classes) == 1
        block = self._reader.block_of(first.line)
        nested = block is not (home.body if isinstance(home, cst.FunctionDef) else home)
        name = f"self.{free}" if own else free
        device = f"{self._quote}cuda{self._quote}"
        options = [f"init_scale={first.init_scale}"] if first.init_scale else []
        options += [f"enabled={first.enabled}"] if first.enabled else []
        off = nested or bool(first.enabled) or not (together or own)
        constructor = f"torch.amp.GradScaler({', '.join([device, *options])})"
        enabled = f", enabled={name}.is_enabled()" if off else ""
        region = f"torch.amp.autocast({device}, dtype=torch.float16{enabled})"
        return _Scaler(name, not (together or own), nested, constructor, region)

    def _define_when_off(self) -> None:
        """Define a disabled scaler for runs that skip `amp.initialize`."""
        scaler, line = self._scaler, self._program.initialize.line
        disabled = f"torch.amp.GradScaler({self._quote}cuda{self._quote}, enabled=False)"
        default = cst.parse_statement(f"{scaler.name} = {disabled}")
        home = self._reader.scope_of(line)
        if scaler.is_global:
            body = self._module.body
            outer = body[self._reader.place_in(self._module, home) or 0]
            defined = (s for s in body if isinstance(s, (cst.FunctionDef, cst.ClassDef)))
            self._before[next(defined, outer)].append(default)
            assert isinstance(home, cst.FunctionDef)
            start = next(s for s in home.body.body if not _is_docstring(s))
            self._before[start].append(cst.parse_statement(f"global {scaler.name}"))
        elif scaler.may_be_off:
            block: Any = home.body if isinstance(home, cst.FunctionDef) else home
            self._before[block.body[self._reader.place_in(block, line) or 0]].append(default)

    def _write(self, backward: Backward) -> None:
        name = self._scaler.name
        loss = self._module.code_for_node(backward.loss)
        used = self._is_used_elsewhere(backward)
        self._replace[backward.node] = lambda node: _scaled(node, f"{name}.scale({loss})", named=used)
        for step in backward.steps:
            self._replace[step] = lambda line: [
                _line(f"{name}.step({backward.optimizer})", line),
                cst.parse_statement(f"{name}.update()"),
            ]
        statement = backward.unscale_before
        if statement is not None and statement not in self._unscaled:
            self._unscaled.add(statement)
            self._before[statement].append(cst.parse_statement(f"{name}.unscale_({backward.optimizer})"))
            for line in backward.leaves:  # else the next call of unscale_ is the second
                self._before[line].append(cst.parse_statement(f"{name}.update()"))

    def _is_used_elsewhere(self, backward: Backward) -> bool:
        """Return whether code outside of the ``with`` reads the name of the scaled loss."""
        name = _name_of(backward.node)
        withs = {each.node for each in self._program.backwards}
        nodes = matchers.findall(self._reader.scope_of(backward.node), matchers.Name(name))
        return any(withs.isdisjoint(self._reader.around(node)) for node in nodes)


def _without_amp(line: Any) -> Lines:
    """Return ``from apex import amp, others`` without amp."""
    node = line.body[0]
    names = [alias for alias in node.names if alias.evaluated_name != "amp"]
    names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return [line.with_changes(body=[node.with_changes(names=names)])]


def _is_docstring(statement: cst.CSTNode) -> bool:
    small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    return isinstance(small, cst.Expr) and isinstance(small.value, (cst.SimpleString, cst.ConcatenatedString))


def _line(code: str, old: Any) -> cst.SimpleStatementLine:
    """Return `code` as a statement with the comments of the one it replaces."""
    new = cst.parse_statement(code)
    assert isinstance(new, cst.SimpleStatementLine)
    trailing = getattr(old, "trailing_whitespace", cst.TrailingWhitespace())
    return new.with_changes(leading_lines=old.leading_lines, trailing_whitespace=trailing)


def _name_of(node: cst.With) -> str:
    asname = node.items[0].asname
    assert asname is not None
    return cst.ensure_type(asname.name, cst.Name).value


def _scaled(node: cst.With, scaled: str, *, named: bool) -> Lines:
    """Return the body of ``with amp.scale_loss(...) as name`` with the scaled loss, `named` if it is kept."""
    name = _name_of(node)
    body: Lines = list(node.body.body)
    if isinstance(node.body, cst.SimpleStatementSuite):
        body = [cst.SimpleStatementLine([s.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)]) for s in body]
    elif isinstance(node.body, cst.IndentedBlock):  # keep the comment after the colon
        lead = [*node.leading_lines, *comments_of([node.body.header])]
        node = node.with_changes(leading_lines=lead)
    first = body[0]
    call = _backward_of(first, name) if len(body) == 1 and not named else None
    if call is not None:
        func = call.func.with_changes(value=cst.parse_expression(scaled))
        lines = [*node.leading_lines, *first.leading_lines]
        return [first.with_changes(body=[cst.Expr(call.with_changes(func=func))], leading_lines=lines)]
    return [_line(f"{name} = {scaled}", node), *body]


def _backward_of(statement: cst.CSTNode, name: str) -> cst.Call | None:
    """Return the call if `statement` is ``name.backward(...)``."""
    call = matchers.Call(matchers.Attribute(matchers.Name(name), matchers.Name("backward")))
    line = matchers.SimpleStatementLine(body=[matchers.Expr(matchers.SaveMatchedNode(call, "call"))])
    match = matchers.extract(statement, line)
    return cast("cst.Call", match["call"]) if match is not None else None
