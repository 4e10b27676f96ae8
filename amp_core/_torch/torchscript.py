"""Undocumented torch names for TorchScript; see `amp_core._torch.internals` for the rules."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch


def is_compiled(function: object) -> bool:
    """Whether `function` is what ``torch.jit.script`` or ``torch.jit.trace`` makes of a function."""
    return isinstance(function, torch.jit.ScriptFunction)


def original_of(function: object) -> types.FunctionType | None:
    """The Python function behind a scripted or traced one.

    For: finding regions that tracing has dropped. If it goes: those are no longer diagnosed.
    """
    found = getattr(function, "_torchdynamo_inline", None)
    return found if isinstance(found, types.FunctionType) else None


def has_regions(function: Any) -> bool:
    """Whether the graph of `function` holds a ``with``; a traced one never does."""
    return any(node.kind() == "prim::Enter" for node in function.inlined_graph.nodes())


def let_script_compile(wrapper: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Have ``torch.jit.script`` compile `function` where scripted code calls `wrapper`.

    For: calling the result of `amp_core.script` from code scripted by torch. It is what
    ``torch.jit.script_if_tracing`` does. If it goes: such a call is refused.
    """
    wrapper.__original_fn = function  # type: ignore[attr-defined]
    wrapper.__script_if_tracing_wrapper = True  # type: ignore[attr-defined]
