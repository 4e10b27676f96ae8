"""Sample the gradients of parameters before a step uses them, or clears them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from amp_core.common.optimizers import parameters_of, watch_gradients
from amp_core.common.replaced import Replaced
from amp_core.debugging.capture import Capture
from amp_core.debugging.places import Place
from amp_core.debugging.tap import measuring


class _Thread(threading.local):
    see: Callable[[Iterable[Tensor]], None] | None = None


_here = _Thread()


@contextmanager
def gradients_sampled(capture: Capture, roots: list[nn.Module]) -> Iterator[None]:
    """Sample in a block the first gradients that optimizers of this thread use, and those left at its end.

    A scaler may skip the step: then they are those that ``zero_grad`` clears.

    Args:
        capture: gets the samples.
        roots: the models whose parameters count; it may grow.
    """

    def see(parameters: Iterable[Tensor]) -> None:
        if capture.run.ran_backward:  # else they are of another step
            _sample(roots, capture, set(map(id, parameters)))

    def use(optimizer: Optimizer) -> None:
        if _here.see is see:
            see(parameters_of(optimizer))

    earlier, _here.see = _here.see, see
    end = watch_gradients(use)
    try:
        with _clearing.block():
            yield
        _sample(roots, capture)
    finally:
        end()
        _here.see = earlier


@measuring()
def _sample(roots: list[nn.Module], capture: Capture, among: set[int] | None = None) -> None:
    for root in roots:
        for name, parameter in root.named_parameters():
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse or (among is not None and id(parameter) not in among):
                continue
            capture.parameter(Place(type(root).__name__, name.rpartition(".")[0]), name, gradient)


def _seen_first(zero_grad: Callable[..., None]) -> Callable[..., None]:
    def call(owner: Any, *args: Any, **kwargs: Any) -> None:
        if _here.see is not None:
            _here.see(owner.parameters() if isinstance(owner, nn.Module) else parameters_of(owner))
        zero_grad(owner, *args, **kwargs)

    return call


_clearing = Replaced(lambda: [(Optimizer, "zero_grad"), (nn.Module, "zero_grad")], _seen_first)
