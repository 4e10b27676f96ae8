"""Base of the tools that stay on a model while it trains."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from amp_core._torch.autograd import current_autograd_node
from amp_core._torch.dynamo import never_compile
from amp_core._torch.tracing import calls_are_captured, is_exporting, outside_graphs, untraced
from amp_core.common.handle import Handle
from amp_core.common.optimizers import parameters_of, watch_gradients
from amp_core.debugging.state_keeper import is_rehearsing


class Attached(Handle):
    """Hooks on a model and on the optimizers that step its parameters, until `remove`.

    Everything that `torch.compile` has compiled is compiled again.

    Attributes:
        step: the number of the model's current training step, from 0: its calls with gradients enabled. Calls
            that are traced, that ``torch.func`` transforms, that a checkpoint repeats or that `compare` and
            `advise` make do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.step = model, -1
        self._thread = threading.get_ident()  # of the current step
        if "torch._dynamo" in sys.modules:  # compiled code does not look for new hooks
            torch.compiler.reset()
        self._removers: list[Callable[[], None]] = []  # an interrupt below leaves hooks that are off
        self._removers += self._watch_calls(Hook(self._enter), Hook(self._leave))
        self._until_gone(watch_gradients(_weakly(self._step)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_removers": []}  # a copy has the findings, and is attached to nothing

    @untraced
    def remove(self) -> None:
        """Detach from the model. Calling it again has no effect."""
        while self._removers:
            self._removers.pop()()

    def _until_gone(self, end: Callable[..., None], *args: object) -> None:
        """Call `end` in `remove`, or once the model and this are gone: the hooks of the model keep this."""
        finalizer = weakref.finalize(self, end, *args)
        finalizer.atexit = False
        self._removers.append(finalizer)

    def _watch_calls(self, before: Hook, after: Hook) -> list[Callable[[], None]]:
        """Let `before` and `after` run with each call of the model; return what ends it."""
        return [
            self.model.register_forward_pre_hook(before, with_kwargs=True).remove,
            self.model.register_forward_hook(after, with_kwargs=True).remove,
        ]

    def _before(self) -> None:
        """Handle the start of a training step."""

    def _after(self, args: Any, kwargs: Any, result: Any) -> None:
        """Handle the end of its forward pass."""

    def _optimize(self, optimizer: Optimizer, parameters: list[Tensor]) -> None:
        """Handle an optimizer that is about to use the gradients of some of the model's `parameters`."""

    @outside_graphs  # a model that is compiled later has these hooks
    def _enter(self, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
        if self._is_on():
            self.step += 1
            self._thread = threading.get_ident()
            self._before()

    @outside_graphs
    def _leave(self, _module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if self._is_on():
            self._after(args, kwargs, result)

    def _is_on(self) -> bool:
        return (
            bool(self._removers)  # compiled code keeps hooks that were removed
            and torch.is_grad_enabled()
            and not is_rehearsing()
            and not repeats_forward()
            and not calls_are_captured()
        )

    @outside_graphs
    def _step(self, optimizer: Optimizer) -> None:
        if is_rehearsing(self._thread):
            return
        mine = {id(parameter) for parameter in self.model.parameters()}
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None and id(p) in mine]
        if parameters:
            self._optimize(optimizer, parameters)


def _weakly(method: Callable[[Optimizer], None]) -> Callable[[Optimizer], None]:
    """Return `method` for a list that must not keep its object, and so a model, alive."""
    ref = weakref.WeakMethod(method)

    def call(optimizer: Optimizer) -> None:
        alive = ref()
        if alive is not None:
            alive(optimizer)

    return call


def repeats_forward() -> bool:
    """Whether a checkpoint repeats, in the backward pass, a forward pass that ran with gradients enabled.

    Reentrant checkpoints run it without gradients first, so that only the repetition is part of training.
    """
    node = current_autograd_node()
    return node is not None and not node.name().startswith("CheckpointFunction")


class Hook:
    """A hook of a module. Copies and pickles of the module have one that does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call the hook, unless ``torch.export`` traces the module."""
        if not is_exporting():
            self._call(*args)

    @property
    def __name__(self) -> str:
        """Not there: ``torch.jit.script`` asks for it, and would compile the hook as a part of the model.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(
            "A hook of amp_core.guard or amp_core.watch has no __name__. If torch.jit.script asks for it: "
            "TorchScript cannot compile a model that is guarded or watched. Call remove() first."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_do_nothing,)


# Else Dynamo, which stops at the hook, compiles it by itself: for each module anew, up to its limit.
never_compile(Hook.__call__)


def _do_nothing(*_: Any) -> None:
    pass
