"""Restore models, optimizers and what else a step uses after a run."""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from amp_core._torch.tensors import is_wrapper, part_of, version_of
from amp_core._torch.tracing import calls_are_captured, outside_graphs, without_torch_functions
from amp_core._torch.transformed_tensors import outside_transforms, unwrapped
from amp_core.common.fsdp import fsdp_class
from amp_core.common.optimizers import exact_states, watch_steps
from amp_core.debugging.used_objects import attributes_for_a_while, schedulers_in, uses_noticed
from amp_core.errors import AmpError
from amp_core.regions.graph_check import kept_buffers

_FSDP1 = (
    "FullyShardedDataParallel (FSDP1) keeps the model's parameters in flat ones of its own between calls, so "
    "compare() and advise() cannot restore them after each run. Shard with "
    "torch.distributed.fsdp.fully_shard, or compare the model before you shard it; record() works with both."
)


_REHEARSING: set[int] = set()  # threads


def is_rehearsing(starter: int | None = None) -> bool:
    """Whether this thread or `starter` runs a step of which nothing remains: it is no step of a training.

    Args:
        starter: the thread that may have started this one: backward passes on a GPU run in autograd's own.
    """
    return threading.get_ident() in _REHEARSING or starter in _REHEARSING


class _Module(NamedTuple):
    """A module's own state, saved because a forward pass may replace a buffer."""

    module: nn.Module
    training: bool
    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]

    @classmethod
    def of(cls, module: nn.Module) -> _Module:
        return cls(module, module.training, dict(module._parameters), dict(module._buffers))

    def restore(self) -> None:
        self.module.training = self.training
        self.module._parameters.clear()
        self.module._parameters.update(self.parameters)
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)


class _Kept(NamedTuple):
    """A tensor, this rank's part of it with an alias of its memory, and what they were.

    A wrapper or a sparse tensor, which may not know how to compare its values, is judged by its version.
    """

    tensor: Tensor
    part: Tensor
    memory: Tensor
    value: Tensor
    version: int | None
    grad: Tensor | None
    leaf: bool

    def restore(self) -> None:
        if (self.part.dtype, self.part.device) != (self.memory.dtype, self.memory.device):
            self.part.data = self.memory  # Module.to() gave it another one
        if not self._is_freed() and self._has_changed():  # else a graph may need it at this version
            self.part.copy_(self.value)
        if self.leaf:
            self.tensor.grad = self.grad

    def _is_freed(self) -> bool:
        """Whether the owner of the memory has given it back, or there is none."""
        if self.part.layout is not torch.strided:
            return False
        return self.part.is_meta or self.part.untyped_storage().nbytes() < self.value.nbytes

    def _has_changed(self) -> bool:
        if self.version is None:
            return not torch.equal(self.part, self.value)
        return version_of(self.part) != self.version


class StateKeeper:
    """Saves the tensors of models and the state of optimizers before a run changes them."""

    def __init__(self) -> None:
        self._tensors: dict[int, _Kept] = {}
        self._optimizers: dict[int, tuple[Optimizer, dict[str, Any]]] = {}
        self._modules: dict[int, _Module] = {}
        self._used: dict[int, tuple[Any, dict[str, Any]]] = {}

    def keep(self, model: nn.Module) -> None:
        """Save the parameters, buffers and training flags of `model`, and clear its gradients.

        Raises:
            AmpError: FSDP1 shards it, TorchScript compiled a part of it, or a parameter is not initialised.
        """
        _check(model)
        _reshard(model.modules())
        swapped = _swapped()
        for module in model.modules():
            if module not in swapped:
                self._modules.setdefault(id(module), _Module.of(module))
        for tensor in (*model.parameters(), *model.buffers()):
            self.keep_tensor(tensor)

    def keep_tensor(self, tensor: Tensor) -> None:
        """Save the value and gradient of a tensor, and clear the gradient."""
        with outside_transforms():
            self._keep_own(unwrapped(tensor))

    def _keep_own(self, tensor: Tensor) -> None:
        if id(tensor) in self._tensors or calls_are_captured():  # captured calls change no values
            return
        with torch.no_grad(), without_torch_functions():
            part = part_of(tensor)
            leaf = tensor.is_leaf  # later, the base of a view may have changed
            grad = tensor.grad if leaf else None
            by_version = is_wrapper(part) or part.layout is not torch.strided
            version = version_of(part) if by_version and not part.is_inference() else None
            memory = part.detach()
            self._tensors[id(tensor)] = _Kept(tensor, part, memory, memory.clone(), version, grad, leaf)
        if leaf:
            tensor.grad = None

    def has_gradients(self) -> bool:
        """Return whether a saved tensor has got a gradient since."""
        return any(kept.tensor.grad is not None for kept in self._tensors.values() if kept.leaf)

    def clear_gradients(self) -> None:
        """Clear the gradients of the saved tensors, as saving them does."""
        for kept in self._tensors.values():
            if kept.leaf:
                kept.tensor.grad = None

    @outside_graphs
    def _keep_optimizer(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = optimizer, copy.deepcopy(optimizer.state_dict())

    def _keep_used(self, used: Any) -> None:
        """Save a scaler, a scheduler with its optimizer, or an average of weights."""
        if isinstance(used, nn.Module):
            self.keep(used)
        elif id(used) not in self._used:
            self._used[id(used)] = used, dict(vars(used))
            if isinstance(used, LRScheduler):
                self._keep_optimizer(used.optimizer)
                for inner in schedulers_in(used):
                    self._keep_used(inner)
            vars(used).update(attributes_for_a_while(used))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Save what a block steps or uses before that, and restore all saved state at its end.

        Other threads may train meanwhile, with optimizers of other parameters.
        """
        mine = {threading.get_ident()} - _REHEARSING  # none in a step that is rehearsed already
        _REHEARSING.update(mine)
        end = watch_steps(self._keep_optimizer, after=False, is_ours=lambda p: id(p) in self._tensors)
        try:
            with uses_noticed(self._keep_used):
                yield
        finally:
            _REHEARSING.difference_update(mine)
            end()
            self._restore()

    def _restore(self) -> None:
        for optimizer, state in self._optimizers.values():
            optimizer.load_state_dict(state)
            for param, exact in exact_states(optimizer, state):
                if param in optimizer.state:
                    optimizer.state[param].update(exact)
        _reshard(each.module for each in self._modules.values())
        with torch.no_grad(), without_torch_functions():
            # Backwards: a view of a tensor may have been kept after it.
            for kept in reversed(self._tensors.values()):
                kept.restore()
        for module in self._modules.values():
            module.restore()
        for used, attributes in self._used.values():
            vars(used).clear()
            vars(used).update(attributes)
        self._used.clear()
        self._tensors.clear()
        self._optimizers.clear()
        self._modules.clear()


def _check(model: nn.Module) -> None:
    """Raise AmpError unless runs of `model` can be compared."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise AmpError(
                f"{_named(name, module)} is compiled by TorchScript, which casts by rules of its own: it has "
                f"no float32 run to compare with. Compare the model before it is compiled."
            )
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(parameter):
            raise AmpError(
                f"{name} is not initialised yet, and a step that is run several times must start from the "
                f"same values. Call the model on a batch before."
            )


def _named(name: str, module: nn.Module) -> str:
    kind = getattr(module, "original_name", type(module).__name__)
    return f"{name} ({kind})" if name else f"The model ({kind})"


_FUNCTIONAL_CALLS = {
    torch.func.functional_call.__code__,
    inspect.unwrap(torch.nn.utils.stateless.functional_call).__code__,
}


def _swapped() -> set[nn.Module]:
    """Return the modules whose parameters and buffers a running ``functional_call`` has replaced."""
    frame, found = inspect.currentframe(), set[nn.Module]()
    while frame is not None:
        if frame.f_code in _FUNCTIONAL_CALLS:
            found.update(frame.f_locals["module"].modules())
        frame = frame.f_back
    return found


def _reshard(modules: Iterable[nn.Module]) -> None:
    """Let FSDP2 put its shards back where it has gathered parameters.

    Raises:
        AmpError: FSDP1 shards one of the modules.
    """
    for module in modules:
        if isinstance(module, fsdp_class("FullyShardedDataParallel")):
            raise AmpError(_FSDP1)
        if isinstance(module, fsdp_class("FSDPModule")):
            module.reshard()


@contextlib.contextmanager
def with_own_buffers(model: nn.Module) -> Iterator[None]:
    """Let `model` write to copies of its buffers in a block: a graph may need them as they are."""
    copies: dict[int, Tensor] = {}
    with kept_buffers(model) as modules:
        for module, originals in modules:
            for name, buffer in originals.items():
                if buffer is not None:
                    copies.setdefault(id(buffer), buffer.detach().clone())
                    module._buffers[name] = copies[id(buffer)]
        yield
