"""The private torch names by which the graphs of `materialize` call ops as cheaply as a program does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from amp_core._torch.dispatcher import Overload, binding_differs, is_mutable, short_name
from amp_core._torch.features import Feature

_BINDINGS = Feature("bindings", "models from amp_core.materialize call each op by its name, which is slower")
_nn: Any = _BINDINGS.value("torch._C._nn", torch.nn.functional)


def binding(op: Overload) -> Callable[..., Any] | str | None:
    """Return the compiled function that torch offers for `op`, or the name of the method of tensors.

    Both take the arguments of the schema. None if there is neither, or if `op` changes an argument.
    """
    if op.namespace != "aten" or binding_differs(op) or is_mutable(op) or not _BINDINGS.works_or_warn():
        return None
    name = short_name(op)
    for owner in (_nn, torch):
        if inspect.isbuiltin(function := getattr(owner, name, None)):
            return function
    return name if inspect.ismethoddescriptor(getattr(torch.Tensor, name, None)) else None


def forget_tracer(graph: fx.Graph) -> None:
    """Let `graph` be pickled: torch.export's tracer, which it names, cannot be built again."""
    graph._tracer_cls = None
