"""A graph module that computes the same after it was pickled."""

from __future__ import annotations

import copy
import operator
from typing import Any

from torch import fx, nn

from amp_core.regions.graph_casts import as_parameter, written_weights


class PickledGraph(fx.GraphModule):
    """A graph module in whose pickles, which are of torch's class, buffers may be parameters.

    fx, which loads a pickle, runs an op on buffers alone there, and keeps the result. For arguments and
    parameters it has stand-ins.
    """

    def __reduce__(self) -> Any:
        """Return what pickle stores."""
        twin = with_its_buffers(fx.GraphModule(self, copy.deepcopy(self.graph)), self)
        twin.train(self.training)
        for name in _run_alone(twin):
            as_parameter(twin, name, operator.attrgetter(name)(twin))
        return twin.__reduce__()


def with_its_buffers(twin: fx.GraphModule, module: fx.GraphModule) -> fx.GraphModule:
    """Return `twin` with the buffers of `module` that are not persistent, as which fx has copied all."""
    kept = module.state_dict().keys()
    for path, buffer in list(twin.named_buffers()):
        owner, _, name = path.rpartition(".")
        twin.get_submodule(owner).register_buffer(name, buffer, persistent=path in kept)
    return twin


def _run_alone(module: fx.GraphModule) -> list[str]:
    """Return the buffers that may change and are given to ops without an argument or a parameter."""
    sources: dict[fx.Node, set[str]] = {}
    used: set[str] = set()
    for node in module.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr":
            is_weight = isinstance(operator.attrgetter(node.target)(module), nn.Parameter)
            sources.update({} if is_weight else {node: {node.target}})
        elif node.op in ("call_function", "call_method") and inputs and all(n in sources for n in inputs):
            sources[node] = set().union(*(sources[each] for each in inputs))
            used |= sources[node]
    return sorted(used & (written_weights(module) | module.state_dict().keys()))
