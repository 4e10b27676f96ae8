"""Skip functions that use no deprecated name, which saves most of the time.

`prune` replaces a function that mentions neither a deprecated name nor a name bound to one by a string of
the same length that is bound to its name, so positions stay valid. It also returns the edits that restore the
functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import libcst as cst

_WORDS = r"amp|apex|autocast\w*|GradScaler|grad_scaler|custom_[fb]wd|OptState|_cast"
_SEED = re.compile(rf"\b(?:{_WORDS})\b")
# An import's alias, or the target of an assignment whose value is a name or a partial, not another call.
_BOUND = re.compile(
    r"\bas\s+(\w+)|^\s*(\w+)\s*(?::[^=\n]+)?=\s*(?:\(?\s*[\w.]+\)?\s*(?:#.*)?$|getattr\b|[\w.]*partial\b|\(\s*$)"
)
_SHORTEST = 2  # replacing shorter functions costs more than it saves

Restored = dict[cst.CSTNode, Callable[[cst.CSTNode], cst.CSTNode]]


def prune(module: cst.Module, text: str) -> tuple[cst.Module, Restored]:
    """Return `module` without irrelevant functions, and the edits that restore them."""
    matters = re.compile(rf"\b(?:{'|'.join([_WORDS, *names_bound_to(text)])})\b")
    restored: Restored = {}
    body = _pruned(module, module.body, matters, restored)
    return module.with_changes(body=body), restored


def names_bound_to(text: str) -> list[str]:
    """Return the names bound on lines that contain one of the words; extra names are harmless."""
    names: set[str] = set()
    for line in text.splitlines():
        if not (_SEED.search(line) or "torch.c" in line):
            continue
        names.update(word for pair in _BOUND.findall(line) for word in pair if word)
    return sorted(names - {"torch"})


def _pruned(
    module: cst.Module, body: Sequence[cst.BaseStatement], matters: re.Pattern[str], restored: Restored
) -> list[cst.BaseStatement]:
    result: list[cst.BaseStatement] = []
    for statement in body:
        if isinstance(statement, cst.FunctionDef):
            result.append(_pruned_function(module, statement, matters, restored))
        elif isinstance(statement, cst.ClassDef) and isinstance(statement.body, cst.IndentedBlock):
            if any(matters.search(module.code_for_node(base)) for base in statement.bases):
                result.append(statement)  # its constructor may need the device
                continue
            inner = _pruned(module, statement.body.body, matters, restored)
            result.append(statement.with_changes(body=statement.body.with_changes(body=inner)))
        else:
            result.append(statement)
    return result


def _pruned_function(
    module: cst.Module, node: cst.FunctionDef, matters: re.Pattern[str], restored: Restored
) -> cst.BaseStatement:
    code = module.code_for_node(node)
    lines = code.count("\n")
    if lines < _SHORTEST or matters.search(code):
        return node
    # A new statement each time: edits are keyed by identity.
    string = cst.SimpleString(f'"""{chr(10) * (lines - 1)}"""')
    target = cst.AssignTarget(cst.Name(node.name.value))
    placeholder = cst.SimpleStatementLine([cst.Assign([target], string)])
    restored[placeholder] = lambda _: node
    return placeholder
