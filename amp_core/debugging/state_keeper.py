"""Puts models and optimizers back to what they were before a run."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from amp_core._torch import internals as _torch
from amp_core.errors import AmpError

_SHARDED = (
    "The parameters of {model} are sharded over processes (DTensor), and compare() and advise() need them "
    "whole, to put them back after each run. Compare the model as it is before fully_shard() or "
    "parallelize_module(); record() takes it as it is."
)


class _Module(NamedTuple):
    """What a module holds itself; a forward pass may put another tensor in the place of a buffer."""

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


class StateKeeper:
    """Remembers what a run is about to change, when it meets it: a model's tensors, an optimizer's state."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        self._optimizers: dict[int, tuple[Optimizer, dict[str, Any]]] = {}
        self._modules: dict[int, _Module] = {}

    def keep(self, model: nn.Module) -> None:
        """Remember the parameters, buffers and training flags of `model`, and take its gradients away.

        Raises:
            AmpError: its parameters are sharded.
        """
        if any(map(_torch.is_dtensor, model.parameters())):
            raise AmpError(_SHARDED.format(model=type(model).__name__))
        for module in model.modules():
            self._modules.setdefault(id(module), _Module.of(module))
        for tensor in (*model.parameters(), *model.buffers()):
            self.keep_tensor(tensor)

    def keep_tensor(self, tensor: Tensor) -> None:
        """Remember the value and the gradient of a tensor, and take the gradient away."""
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = tensor, tensor.detach().clone(), tensor.grad
            tensor.grad = None

    def _keep_optimizer(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = optimizer, copy.deepcopy(optimizer.state_dict())

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Watch for optimizers in a block, and put everything back at its end."""
        hook = register_optimizer_step_pre_hook(self._keep_optimizer)
        try:
            yield
        finally:
            hook.remove()
            self._restore()

    def _restore(self) -> None:
        for optimizer, state in self._optimizers.values():
            optimizer.load_state_dict(state)
        with torch.no_grad():
            for tensor, value, grad in self._tensors.values():
                if tensor.untyped_storage().nbytes() >= value.nbytes:  # else its owner has freed it
                    tensor.copy_(value)
                tensor.grad = grad
        for module in self._modules.values():
            module.restore()
        self._tensors.clear()
        self._optimizers.clear()
        self._modules.clear()


@contextlib.contextmanager
def seeded(seed: int, device_type: str) -> Iterator[None]:
    """Draw from `seed` in a block, in torch and `random`; afterwards be as if nothing had been drawn."""
    state = random.getstate()
    accelerator = torch.accelerator.current_accelerator()
    ours = accelerator is not None and accelerator.type == device_type
    devices = [torch.accelerator.current_device_index()] if ours else []
    with torch.random.fork_rng(devices, device_type=device_type if ours else "cpu"):
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
