"""Rewrite the casts of a traced graph, and store its weights in the dtypes that it uses."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from amp_core._torch.dispatcher import Overload, is_view
from amp_core._torch.tracing import checks_dtype, to_copy


def store_casts(module: fx.GraphModule) -> None:
    """Let `module` cast each value once, and store weights that it uses in one low dtype in that dtype.

    Its weights become its own, frozen: the model that was traced keeps the others, and may train them.
    """
    _join_tied(module)
    for name, weight in list(module.named_parameters()):
        as_parameter(module, name, weight.detach())
    _cast_before_moves(module.graph)
    _share_casts(module.graph)
    _store_low(module)


def _join_tied(module: fx.GraphModule) -> None:
    """Give a weight with several names the first of them, so that it is stored once."""
    first: dict[int, fx.Node] = {}
    for node in list(module.graph.find_nodes(op="get_attr")):
        owner, _, name = node.target.rpartition(".")
        parent = module.get_submodule(owner)
        weight = getattr(parent, name)
        earlier = first.setdefault(id(weight), node)
        if isinstance(weight, nn.Parameter) and earlier is not node:
            node.replace_all_uses_with(earlier)
            module.graph.erase_node(node)
            if node.target != earlier.target:
                delattr(parent, name)


def _share_casts(graph: fx.Graph) -> None:
    """Cast each value to each dtype once, and drop the checks of dtypes that tracing added."""
    casts: dict[tuple[fx.Node, Any], fx.Node] = {}
    for node in list(graph.nodes):
        if checks_dtype(node.target):
            graph.erase_node(node)
        elif is_cast(node):
            earlier = casts.setdefault((node.args[0], node.kwargs["dtype"]), node)
            if earlier is not node and not _is_returned(node):
                node.replace_all_uses_with(earlier)
                graph.erase_node(node)


def is_cast(node: fx.Node) -> bool:
    """Return whether `node` changes the dtype of a tensor, and nothing else."""
    return node.target is to_copy and set(node.kwargs) == {"dtype"}


def _is_returned(node: fx.Node) -> bool:
    """Return whether the caller gets the memory of `node`, and may write to it: it must be new memory."""
    return any(user.op == "output" or (_is_part(user) and _is_returned(user)) for user in node.users)


def _is_part(node: fx.Node) -> bool:
    op = node.target
    return op is operator.getitem or (isinstance(op, Overload) and is_view(op))


_aten = torch.ops.aten
_MOVES = {
    _aten.embedding.default,
    _aten.expand.default,
    _aten.index_select.default,
    _aten.permute.default,
    _aten.reshape.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
}
"""Ops whose result consists of elements of their first argument: a cast before them gives the same bits."""


def _cast_before_moves(graph: fx.Graph) -> None:
    """Cast a weight itself where it is used in one low dtype only, also after views or a choice of rows."""
    for weight in graph.find_nodes(op="get_attr"):
        paths = [_path_to_cast(weight, user) for user in weight.users]
        dtypes = {path[-1].kwargs["dtype"] if path else None for path in paths}
        if len(dtypes) != 1:
            continue
        for *moves, old in (path for path in paths if path and len(path) > 1):
            with graph.inserting_after(weight):
                cast = graph.call_function(to_copy, (weight,), old.kwargs)
            cast.meta["val"] = weight.meta["val"]
            for node in (cast, *moves):  # later casts are bound by the dtypes that these say
                node.meta["val"] = node.meta["val"].to(**old.kwargs)
            moves[0].replace_input_with(weight, cast)
            old.replace_all_uses_with(moves[-1])
            graph.erase_node(old)


def _path_to_cast(weight: fx.Node, user: fx.Node) -> list[fx.Node] | None:
    """Return the moves from `weight` to a cast, and the cast; None if it is used without one."""
    path, source = [user], weight
    while not is_cast(user):
        if user.target not in _MOVES or user.args[0] is not source or len(user.users) != 1:
            return None
        source, user = user, next(iter(user.users))
        path.append(user)
    return None if _is_returned(user) else path


def _store_low(module: fx.GraphModule) -> None:
    """Store each weight whose only use is one cast in the dtype of that cast."""
    for node in list(module.graph.find_nodes(op="get_attr")):
        owner, _, name = node.target.rpartition(".")
        weight, users = getattr(module.get_submodule(owner), name), list(node.users)
        only_cast = len(users) == 1 and is_cast(users[0]) and not _is_returned(users[0])
        if isinstance(weight, Tensor) and only_cast:
            as_parameter(module, node.target, weight.detach().to(users[0].kwargs["dtype"]))
            node.meta = users[0].meta
            users[0].replace_all_uses_with(node)
            module.graph.erase_node(users[0])


def written_weights(module: fx.GraphModule) -> set[str]:
    """Return the paths of the parameters and buffers to which the graph writes."""
    writes = module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return {node.args[0].target for node in writes if node.args[0].op == "get_attr"}


def as_parameter(module: nn.Module, path: str, weight: Tensor) -> None:
    """Replace the tensor at `path` by a frozen parameter with the memory of `weight`."""
    owner, _, name = path.rpartition(".")
    parent = module.get_submodule(owner)
    delattr(parent, name)
    parent.register_parameter(name, nn.Parameter(weight, requires_grad=False))
