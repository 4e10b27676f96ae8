"""Rewrite the source of one module: apex programs as a whole, everything else name by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection

import libcst as cst

from amp_compat.migrate.apex.to_torch import CannotRewriteError, apex_to_torch
from amp_compat.migrate.codemod import ModuleRewriter
from amp_compat.migrate.imports import bound_names
from amp_compat.migrate.model import Finding, Rewritten
from amp_compat.migrate.names import Target
from amp_compat.migrate.tree import quote_of, syntax_error

_APEX = re.compile(r"\bapex\b")
_CURRENT = re.compile(
    r"\btorch\.(?:amp|autocast)\b|^\s*from torch import .*\b(?:amp|autocast)\b", re.MULTILINE
)
_MIXED = "the file uses both apex.amp and torch's own mixed precision; which one runs is ambiguous"
_EXPORTED = "other files import {names} from here"


def migrate_source(text: str, target: Target, exported: Collection[str] = ()) -> Rewritten:
    """Rewrite deprecated names in `text`.

    Args:
        text: source of one Python module.
        target: the package to migrate to.
        exported: names that other files import from this module; their imports stay as they are.

    Raises:
        libcst.ParserSyntaxError: libcst cannot parse `text`.
    """
    if target.module != "torch.amp" or not _APEX.search(text):
        return ModuleRewriter(text, target, exported).rewrite()
    try:
        done = apex_to_torch(text, target, quote_of(text))
        why = _why_not(text, done[0], target, exported) if done is not None else ""
        if done is not None and not why:
            return Rewritten(*done)
        rejected = [Finding(f.line, f.column, "manual", f.name, why) for f in done[1][:1]] if done else []
    except CannotRewriteError as error:
        rejected = [error.finding]
    rest = ModuleRewriter(text, target, exported).rewrite()
    return Rewritten(rest.text, sorted([*rejected, *rest.findings], key=lambda f: (f.line, f.column)))


def _code(text: str) -> str:
    """Return `text` without comments, if Python can parse it."""
    return text if syntax_error(text) else ast.unparse(ast.parse(text))


def _why_not(text: str, new: str, target: Target, exported: Collection[str]) -> str:
    """Return why `new` cannot replace `text`, or ""."""
    if _CURRENT.search(_code(text)) or ModuleRewriter(new, target, exported).rewrite().findings:
        return _MIXED
    gone = set(bound_names(cst.parse_module(text))) - set(bound_names(cst.parse_module(new)))
    names = ", ".join(sorted(gone & set(exported)))
    return _EXPORTED.format(names=names) if names else ""
