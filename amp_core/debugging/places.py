"""Track which module an op belongs to in the forward and backward passes."""

from __future__ import annotations

import bisect
import threading
import warnings
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from amp_core._torch.autograd import (
    backward_pass,
    current_autograd_node,
    in_backward,
    next_sequence_number,
    sequence_number,
)
from amp_core._torch.modules import uncompiled
from amp_core.common.call_site import place_outside
from amp_core.common.locks import new_lock
from amp_core.errors import AmpError
from amp_core.regions.replaced_forward import runs_in_float32


class Place(NamedTuple):
    """A location in a model.

    Attributes:
        model: the class of the outermost called module; empty outside modules.
        module: its submodule, named as by ``named_modules()``; empty for the model itself.
    """

    model: str
    module: str

    def __str__(self) -> str:
        return self.module or (f"({self.model})" if self.model else "(outside modules)")


class _Call(NamedTuple):
    """A call of a module, and the backward pass that made it, if one did."""

    module: nn.Module
    place: Place
    backward_pass: int


class _Parameter(NamedTuple):
    """A parameter and the model that names it; kept alive, so that no other tensor gets its ``id``."""

    place: Place
    name: str
    root: nn.Module
    parameter: nn.Parameter


NOWHERE = Place("", "")
_HOOKS_FIRE_TWICE = r"Using `torch.compile\(module\)` when there are global hooks"  # our hooks allow for that
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_hooking = new_lock()
"""Recordings in several threads change the same hooks and warning filters."""


class Places:
    """Tracks the modules that one thread calls.

    Each autograd node has a sequence number from its thread. `Places` stores the sequence numbers at which
    modules start and end, which map a node in the backward pass to its module.

    Args:
        model: the model that names the modules; by default, the outermost called module. Parts that a
            checkpoint calls again, in the backward pass, keep the names of the first call.

    Attributes:
        roots: the outermost called modules, in order, without those parts that a checkpoint calls again.
        on_call: called with the outermost module before each call.
        on_return: called with each module's place, arguments and result.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.roots: list[nn.Module] = []
        self.on_call: Callable[[nn.Module], None] | None = None
        self.on_return: Callable[[Place, Any, Any], None] | None = None
        self._model = model
        self._repeated: list[nn.Module] = []
        self._stack: list[_Call] = []
        self._names: dict[nn.Module, dict[int, Place]] = {}
        self._parameters: dict[int, _Parameter] = {}
        self._filters: list[Any] = []
        self._hooks: list[RemovableHandle] = []
        self._starts = array("Q")
        self._places: list[Place] = []

    @staticmethod
    def check(model: object) -> None:
        """Validate `model`.

        Raises:
            TypeError: `model` is neither a module nor None.
        """
        if not isinstance(model, nn.Module | None):
            raise TypeError(
                f"model= must be the torch.nn.Module that names the modules, not {type(model).__name__}."
            )

    def attach(self) -> None:
        """Start tracking the calling thread."""
        if self._model is not None:
            self._named(self._model)  # first: it may raise
        self._thread = threading.get_ident()
        with _hooking:
            before = [*warnings.filters]
            warnings.filterwarnings("ignore", _HOOKS_FIRE_TWICE)
            self._filters = [f for f in warnings.filters[:1] if f not in before]  # empty inside another one
            self._hooks.append(register_module_forward_pre_hook(self.enter))
            self._hooks.append(register_module_forward_hook(self._leave, always_call=True))
        self._mark()

    def detach(self) -> None:
        """Stop tracking, also if an interrupt came while it started."""
        self._names.clear()  # they keep models alive, and so do the parameters
        self._parameters.clear()
        with _hooking:
            for hook in self._hooks:
                hook.remove()
            for ours in self._filters:
                if ours in warnings.filters:
                    cast("list[Any]", warnings.filters).remove(ours)

    @property
    def here(self) -> Place:
        """The innermost module in the current call."""
        return self._stack[-1].place if self._stack else NOWHERE

    @property
    def in_float32(self) -> bool:
        """Whether the current call is inside a module with the rule ``"fp32"`` from `apply_policy`."""
        return any(runs_in_float32(call.module) for call in self._stack)

    @property
    def in_module(self) -> bool:
        """Whether a module call is in progress, and not a backward pass that began within it."""
        return bool(self._stack) and self._stack[-1].backward_pass == backward_pass()

    def of_node(self, node: Any) -> Place:
        """Return the module whose call created the autograd node."""
        if node.name() == _ACCUMULATE:
            return self.of_parameter(node.variable)[0]
        index = bisect.bisect_right(self._starts, sequence_number(node)) - 1
        return self._places[index] if index >= 0 else NOWHERE

    def of_parameter(self, tensor: Any) -> tuple[Place, str]:
        """Return a parameter's module and name in the model; `NOWHERE` and "" for other tensors."""
        known = self._parameters.get(id(tensor))
        return (NOWHERE, "") if known is None else (known.place, known.name)

    @property
    def models(self) -> list[nn.Module]:
        """The given model and the roots, each once."""
        models = [self._model] if self._model is not None else []
        for root in self.roots:
            _add(models, root)
        return models

    def model_of(self, tensor: Any) -> nn.Module | None:
        """Return the model that names a parameter; None for other tensors."""
        known = self._parameters.get(id(tensor))
        return None if known is None else known.root

    def enter(self, module: nn.Module, _args: Any = None) -> None:
        """Note that a call of `module` begins."""
        if threading.get_ident() == self._thread:
            if not self._stack:
                self._names.clear()  # layers may be others than in the call before
                self._repeated = [*self.roots] if in_backward() else []  # a checkpoint calls parts of these
            place = self._place(module)  # first: it may raise
            if not self._stack:
                if self.on_call is not None:
                    self.on_call(uncompiled(module))
                if not any(id(uncompiled(module)) in self._named(root) for root in self._repeated):
                    _add(self.roots, uncompiled(module))
            self._stack.append(_Call(module, place, backward_pass()))
            self._mark()

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if threading.get_ident() == self._thread and any(call.module is module for call in self._stack):
            while self._stack[-1].module is not module:
                self._stack.pop()
            place = self._stack.pop().place
            self._mark()
            if self.on_return is not None and result is not None:
                self.on_return(place, args, result)

    def _mark(self) -> None:
        self._starts.append(next_sequence_number())
        self._places.append(self.here)

    def _place(self, module: nn.Module) -> Place:
        outermost = self._stack[0].module if self._stack else module
        for root in (self._model, *self._repeated, uncompiled(outermost)):
            place = None if root is None else self._named(root).get(id(uncompiled(module)))
            if place is not None:
                return place
        above = self._stack[-1].place
        return Place(above.model, f"{above.module}.<{type(module).__name__}>".lstrip("."))

    def _named(self, root: nn.Module) -> dict[int, Place]:
        if root not in self._names:
            model = type(root).__name__
            try:
                self._names[root] = {id(m): Place(model, name) for name, m in root.named_modules()}
            except ValueError as error:
                raise AmpError(_REMOTE.format(model=model, error=error)) from error
            for name, parameter in root.named_parameters():
                known = self._parameters.get(id(parameter))
                if known is None or known.root is root:  # the first model that has it names it
                    place = Place(model, name.rpartition(".")[0])
                    self._parameters[id(parameter)] = _Parameter(place, name, root, parameter)
        return self._names[root]


_REMOTE = (
    "The modules of {model} cannot be named: {error}. A part of it is in another process. Call its local "
    "parts by themselves, each in a block of its own, and look at the remote part in its process."
)


class Lines:
    """Finds the program's line behind each op of the calling thread, also in the backward pass."""

    def __init__(self) -> None:
        self._ends = array("Q")
        self._lines: list[str] = []

    def of_op(self, backward: bool) -> str:
        """Return ``file:line`` for the op that just ran; in the backward pass, for its forward op."""
        if backward:
            node = current_autograd_node()
            if node is None:  # between nodes, as where FSDP2 reduces gradients
                return ""
            index = bisect.bisect_right(self._ends, sequence_number(node))
            return self._lines[index] if index < len(self._lines) else ""
        self._ends.append(next_sequence_number())
        self._lines.append(place_outside(("torch",)))
        return self._lines[-1]


def _add(modules: list[nn.Module], module: nn.Module) -> None:
    if not any(module is other for other in modules):
        modules.append(module)
