"""The check of `materialize`: whether a graph gives the bits of the region, call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.common.containers import map_tensors, tensors_in
from amp_core.common.generators import kept_generators
from amp_core.errors import MaterializeError
from amp_core.policy import OpPolicy
from amp_core.policy.coverage import REDUCTION, missing
from amp_core.regions.region import autocast

_LOST = (
    "The graph of {name} gives the bits of the region once, but not when it is called again: it does not "
    "keep what a call writes to the buffers. torch.export loses the buffers that a submodule replaces, as in "
    "self.mean = self.mean + x. Write to them, as in self.mean.copy_(self.mean + x)."
)
_MOVED = (
    "{name} puts tensors into the containers among its arguments, or takes some out, and its graph does not: "
    "torch.export keeps ops on tensors alone. Return such tensors, or write to those that are there, as in "
    'cache["x"].copy_(x).'
)


def check_graph(
    graph: nn.Module,
    model: nn.Module,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    region: autocast,
    policy: OpPolicy,
    ops: set[str],
    written: list[Tensor],
) -> None:
    """Raise unless `graph` gives what `model` gives in `region`; leave both as they are.

    Args:
        graph: the graph.
        model: the model from which it was traced.
        given: example arguments, by position and by name.
        region: the region.
        policy: its op policy.
        ops: the ops that were traced.
        written: the weights to which the graph writes.

    Raises:
        MaterializeError: the results differ, or what was written to the arguments.
    """
    mine, its = [map_tensors(given, Tensor.clone) for _ in range(2)]  # to write to
    its_tensors = [*tensors_in(its)]
    outside = autocast(region.device, enabled=False)
    with (
        torch.no_grad(),
        _left_as_it_is(model, written) as has_changed,
        kept_generators(region.device),
        frozen(model),
        region,
    ):
        wanted = [_called(model, its)]
        if has_changed():  # the next call reads what this one wrote
            wanted.append(_called(model, its))
    with torch.no_grad(), _left_as_it_is(graph, written), kept_generators(region.device), outside:
        results = [_called(graph, mine) for _ in wanted]
    if not _all_same(results[1:], wanted[1:]) and _all_same(results[:1], wanted[:1]):
        raise MaterializeError(_LOST.format(name=type(model).__name__))
    if not _all_same(mine, its) and any(a is not b for a, b in zip_longest(its_tensors, tensors_in(its))):
        raise MaterializeError(_MOVED.format(name=type(model).__name__))
    _compare((results, mine), (wanted, its), model, ops, policy)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Let torch choose its kernels as for the graph, whose weights require no gradients."""
    trained = [p for p in model.parameters() if p.requires_grad and not p.is_inference()]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _called(model: nn.Module, given: tuple[Any, Any]) -> list[Tensor]:
    """Return copies of the tensors that `model` returns: a later call may write to them."""
    return [result.clone() for result in tensors_in(model(*given[0], **given[1]))]


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[list[tuple[nn.Module, dict[str, Tensor | None]]]]:
    """Put back the buffers that the block replaces in `model`; yield them by module."""
    modules = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        yield modules
    finally:
        for module, named in modules:
            module._buffers.clear()
            module._buffers.update(named)


@contextmanager
def _left_as_it_is(model: nn.Module, written: list[Tensor]) -> Iterator[Callable[[], bool]]:
    """Undo what the block does to `written` and to the buffers of `model`, such as running statistics.

    Yields:
        Whether it has done anything to them yet.
    """
    with kept_buffers(model) as modules:
        tensors = [b for _, named in modules for b in named.values() if b is not None] + written
        values = [(t, t.clone()) for t in tensors if t.layout is torch.strided and not t.is_inference()]

        def has_changed() -> bool:
            replaced = any(
                module._buffers.get(name) is not b for module, named in modules for name, b in named.items()
            )
            return replaced or not all(torch.equal(tensor, value) for tensor, value in values)

        try:
            yield has_changed
        finally:
            for tensor, value in values:
                if not torch.equal(tensor, value):  # batch norms leave the version counter
                    tensor.copy_(value)


def _compare(result: Any, wanted: Any, model: nn.Module, ops: set[str], policy: OpPolicy) -> None:
    if _all_same(result, wanted):
        return
    name = type(model).__name__
    differs = f"The graph of {name} does not give the bits of the region on the example arguments. "
    fused = next((path for path, module in model.named_modules() if _has_fused_path(module)), None)
    if fused is not None:
        raise MaterializeError(
            f"{differs}Without gradients, {fused or name} runs as torch's fused kernel, which rounds "
            f"elsewhere and which no trace has. Call torch.backends.mha.set_fastpath_enabled(False) before "
            f"materialize, and before the region that is to give the same bits."
        )
    unruled = [op for op, kind in missing(policy).items() if kind != REDUCTION and op in ops]
    without_rule = f"Its matrix products and custom ops without a rule: {', '.join(unruled)}; give each one "
    advice = f"{without_rule}(OpPolicy.override). " if unruled else ""
    raise MaterializeError(
        f"{differs}{advice}A model that asks whether it is traced (torch.compiler.is_compiling) may run "
        f"other ops then: compare what torch.export makes of it, without a region, with the model. If "
        f"the results are random or the kernels not deterministic, pass check=False."
    )


def _has_fused_path(module: nn.Module) -> bool:
    fused = isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer))
    return fused and not module.training and torch.backends.mha.get_fastpath_enabled()


def _all_same(a: Any, b: Any) -> bool:
    pairs = zip_longest(tensors_in(a), tensors_in(b))
    return all(x is not None and y is not None and _same(x, y) for x, y in pairs)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype is not b.dtype or a.shape != b.shape or a.layout is not b.layout:
        return False
    a, b = (t if t.layout is torch.strided else t.to_dense() for t in (a, b))
    differs = (_bytes(a) != _bytes(b)).any(-1)  # 0.0 equals -0.0, but their bits differ
    return not (differs & ~(a.isnan() & b.isnan())).any()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().unsqueeze(-1).view(torch.uint8)
