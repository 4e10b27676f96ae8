"""Make calls of an exported graph as cheap as those of a hand-written model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from amp_core._torch.bindings import binding, forget_tracer
from amp_core._torch.dispatcher import Overload
from amp_core._torch.tracing import to_copy
from amp_core.regions.graph_casts import is_cast
from amp_core.regions.graph_pickles import PickledGraph, with_its_buffers

_CONDITIONS = "_guards_fn"


def call_directly(module: fx.GraphModule, in_spec: Any) -> fx.GraphModule:
    """Return `module`, an exported program, without what ``torch.export`` puts around the ops.

    Its hooks compare the structure of the arguments, `in_spec`; a signature of plain values does that by
    itself. Its conditions on shapes are a function that cannot be pickled. And to call an overload by name
    costs about twice as much as torch's own binding of the op.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_module" and node.target == _CONDITIONS:
            _inline(node, module.get_submodule(_CONDITIONS))
        elif node.op == "get_attr" and not node.users:
            graph.erase_node(node)
        elif isinstance(node.target, Overload):
            _bind(node)
    if not all(child.is_leaf() for part in in_spec.children() for child in part.children()):
        module.recompile()
        return module
    forget_tracer(graph)
    return with_its_buffers(PickledGraph(module, graph), module)


def _inline(node: fx.Node, conditions: Callable[..., Any]) -> None:
    """Write the asserts of `conditions` into the graph; if one branches on a value, they stay a call."""
    graph, before = node.graph, node.prev
    tracer = fx.proxy.GraphAppendingTracer(graph)
    try:
        with graph.inserting_before(node):
            conditions(*(fx.Proxy(arg, tracer) if isinstance(arg, fx.Node) else arg for arg in node.args))
    except fx.proxy.TraceError:
        while node.prev is not before:
            graph.erase_node(node.prev)
    else:
        graph.erase_node(node)


def _bind(node: Any) -> None:
    """Call what a program would call for the op of `node`."""
    first: Any = node.args[0] if node.args else None
    if not isinstance(first, (fx.Node, list, tuple)):
        return  # it makes a tensor: a default device or dtype would reach the binding
    if node.target is to_copy:
        # Tensor.to copies only what is in another dtype.
        casts = is_cast(node) and node.args[0].meta["val"].dtype is not node.kwargs["dtype"]
        direct: Callable[..., Any] | str | None = "to" if casts else None
    else:
        direct = binding(node.target)
    if direct is not None:
        node.op = "call_method" if isinstance(direct, str) else node.op
        node.target = direct
