"""The dtypes in which a run keeps parameters, buffers, gradients and the state of optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from amp_core._torch.tracing import without_torch_functions
from amp_core.common.optimizers import parameters_of
from amp_core.common.text import dtype_name

PARAMETER, BUFFER, GRADIENT, STATE = "parameter", "buffer", "gradient", "optimizer state"


class TensorKey(NamedTuple):
    """A tensor that outlives the ops that use it.

    Attributes:
        kind: ``parameter``, ``buffer``, ``gradient`` or ``optimizer state``.
        name: the name of the parameter or buffer in the model.
        state: the entry of the optimizer's state, such as ``exp_avg``; otherwise empty.
        dtype: its dtype.
        model: the number of the model, from 0, if several are called side by side.
    """

    kind: str
    name: str
    state: str
    dtype: str
    model: int = 0


def of_models(models: Iterable[nn.Module]) -> Iterator[tuple[TensorKey, int]]:
    """Yield the floating-point tensors of `models`, and the number of their elements over all ranks.

    A tied parameter or buffer is there by each of its names, as globs match any, with 0 elements but once.
    """
    seen: set[int] = set()
    for number, model in enumerate(models):
        for key, size in _of_model(model, seen):
            yield key._replace(model=number), size


def _of_model(model: nn.Module, seen: set[int]) -> Iterator[tuple[TensorKey, int]]:
    for name, param in model.named_parameters(remove_duplicate=False):
        yield from _entry(PARAMETER, name, "", param, counts=id(param) not in seen)
        if id(param) not in seen:
            yield from _entry(GRADIENT, name, "", param.grad)
        seen.add(id(param))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield from _entry(BUFFER, name, "", buffer, counts=id(buffer) not in seen)
        seen.add(id(buffer))


def of_step(
    optimizer: Optimizer, name_of: Callable[[Tensor], tuple[str, int]]
) -> Iterator[tuple[TensorKey, int]]:
    """Yield the gradients that `optimizer` has just used, and its state."""
    for param in parameters_of(optimizer):
        name, model = name_of(param)
        values = {str(key): value for key, value in optimizer.state.get(param, {}).items()}
        entries = [_entry(STATE, name, key, value) for key, value in values.items()]
        for key, size in itertools.chain(_entry(GRADIENT, name, "", param.grad), *entries):
            yield key._replace(model=model), size


def _entry(
    kind: str, name: str, state: str, tensor: Any, *, counts: bool = True
) -> Iterator[tuple[TensorKey, int]]:
    if not isinstance(tensor, Tensor) or nn.parameter.is_lazy(tensor):  # which has no size yet
        return
    with without_torch_functions():
        is_float, dtype, size = tensor.is_floating_point(), dtype_name(tensor.dtype), tensor.numel()
    if is_float:
        yield TensorKey(kind, name, state, dtype), size if counts else 0
