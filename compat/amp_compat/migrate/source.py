"""Rewrites the text of one module: a program that uses apex as a whole, everything else name by name."""

from __future__ import annotations

import re
from collections.abc import Collection

import libcst as cst

from amp_compat.migrate.apex.to_torch import CannotRewriteError, apex_to_torch
from amp_compat.migrate.codemod import ModuleRewriter
from amp_compat.migrate.imports import bound_names
from amp_compat.migrate.model import Finding, Rewritten
from amp_compat.migrate.names import Target
from amp_compat.migrate.tree import quote_of

_APEX = re.compile(r"\bapex\b")
_BESIDE = "apex.amp and torch's deprecated names stand side by side: which runs is not known here"
_EXPORTED = "other files import {names} from here"


def migrate_source(text: str, target: Target, exported: Collection[str] = ()) -> Rewritten:
    """Rewrite deprecated names in `text`.

    Args:
        text: source of one Python module.
        target: where the names go.
        exported: names that other files import from this module; their imports stay as they are.

    Raises:
        libcst.ParserSyntaxError: `text` is not Python that libcst can read.
    """
    if target.module != "torch.amp" or not _APEX.search(text):
        return ModuleRewriter(text, target, exported).rewrite()
    try:
        done = apex_to_torch(text, target, quote_of(text))
        why = _why_not(text, done[0], target, exported) if done is not None else ""
        if done is not None and not why:
            return Rewritten(*done)
        found = [Finding(f.line, f.column, "manual", f.name, why) for f in done[1][:1]] if done else []
    except CannotRewriteError as error:
        found = [error.finding]
    rest = ModuleRewriter(text, target, exported).rewrite()
    return Rewritten(rest.text, sorted([*found, *rest.findings], key=lambda f: (f.line, f.column)))


def _why_not(text: str, new: str, target: Target, exported: Collection[str]) -> str:
    """Return why `new` cannot stand for `text`, or ""."""
    if ModuleRewriter(new, target, exported).rewrite().findings:
        return _BESIDE
    gone = set(bound_names(cst.parse_module(text))) - set(bound_names(cst.parse_module(new)))
    names = ", ".join(sorted(gone & set(exported)))
    return _EXPORTED.format(names=names) if names else ""
