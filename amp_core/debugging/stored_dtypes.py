"""The dtypes in which a run keeps parameters, buffers, gradients and the state of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

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
    """

    kind: str
    name: str
    state: str
    dtype: str


def of_model(model: nn.Module) -> Iterator[tuple[TensorKey, int]]:
    """Yield the floating-point tensors of `model`, and the number of their elements over all ranks.

    A tied parameter or buffer is there by each of its names, as globs match any, with 0 elements but once.
    """
    seen: set[int] = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        yield from _entry(PARAMETER, name, "", param, counts=id(param) not in seen)
        if id(param) not in seen:
            yield from _entry(GRADIENT, name, "", param.grad)
        seen.add(id(param))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield from _entry(BUFFER, name, "", buffer, counts=id(buffer) not in seen)
        seen.add(id(buffer))


def of_step(optimizer: Optimizer, name_of: Callable[[Tensor], str]) -> Iterator[tuple[TensorKey, int]]:
    """Yield the gradients that `optimizer` has just used, and its state."""
    for param in parameters_of(optimizer):
        name = name_of(param)
        yield from _entry(GRADIENT, name, "", param.grad)
        for key, value in optimizer.state.get(param, {}).items():
            yield from _entry(STATE, name, str(key), value)


def _entry(
    kind: str, name: str, state: str, tensor: Any, *, counts: bool = True
) -> Iterator[tuple[TensorKey, int]]:
    is_tensor = isinstance(tensor, Tensor) and not nn.parameter.is_lazy(tensor)  # which has no size yet
    if is_tensor and tensor.is_floating_point():
        yield TensorKey(kind, name, state, dtype_name(tensor.dtype)), tensor.numel() if counts else 0
