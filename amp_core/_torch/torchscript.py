"""The private torch names for TorchScript."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from amp_core._torch.features import Feature

_DIAGNOSIS = Feature(
    "script_diagnosis",
    "amp_core.script cannot tell that a function it calls lost its regions in a trace",
    probed=("ScriptFunction._torchdynamo_inline",),
)

_GRADIENTS = Feature(
    "script_gradients",
    "amp_core.script cannot tell that TorchScript differentiates a region without its casts",
)
_optimises = _GRADIENTS.function(
    "torch._C._get_graph_executor_optimize", lambda: False, check=lambda function: function()
)


def derives_gradients() -> bool:
    """Whether TorchScript may derive the gradients of the code that runs by its own formulas."""
    return torch.is_grad_enabled() and bool(_optimises())


@_DIAGNOSIS.probe
def _check_original() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit")
        scripted = torch.jit.script(_same)
    if getattr(scripted, "_torchdynamo_inline", None) is not _same:
        raise RuntimeError("a scripted function does not lead back to the Python function")


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def is_scripted(function: object) -> bool:
    """Whether `function` is what ``torch.jit.script`` or ``torch.jit.trace`` returns for a function."""
    return isinstance(function, torch.jit.ScriptFunction)


def original_of(function: object) -> types.FunctionType | None:
    """Return the Python function behind a scripted or traced one."""
    if not _DIAGNOSIS.works_or_warn():
        return None
    original = getattr(function, "_torchdynamo_inline", None)
    return original if isinstance(original, types.FunctionType) else None


def has_regions(function: Any) -> bool:
    """Whether the graph of `function` holds a ``with``; a traced one never does."""
    graph = function.inlined_graph  # its nodes do not keep it alive
    return bool(graph.findAllNodes("prim::Enter", recurse=True))


def splits_addmm(function: Any) -> bool:
    """Whether TorchScript will compute an ``addmm`` of `function` as ``mm`` and ``add``."""
    graph = function.inlined_graph
    found = graph.findAllNodes("aten::addmm", recurse=True)
    return any(factor.toIValue() == 1 for node in found for factor in [*node.inputs()][3:])


def let_script_compile(wrapper: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Have ``torch.jit.script`` compile `function` where scripted code calls `wrapper`.

    Without it such a call is refused. The marks that say so are those of ``torch.jit.script_if_tracing``.
    """
    copy_marks(torch.jit.script_if_tracing(function), wrapper)  # type: ignore[no-untyped-call]


def copy_marks(source: Callable[..., Any], target: Callable[..., Any]) -> None:
    """Give `target` the attributes that torch put on `source`, whatever their names."""
    vars(target).update({name: value for name, value in vars(source).items() if name != "__wrapped__"})
