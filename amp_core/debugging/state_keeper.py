"""Restore models and optimizers after a run."""

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
    "The parameters of {model} are sharded over processes (DTensor), but compare() and advise() need whole "
    "parameters to restore them after each run. Compare the model before fully_shard() or "
    "parallelize_module(); record() also works with sharded models."
)


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


class StateKeeper:
    """Saves the tensors of models and the state of optimizers before a run changes them."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        self._optimizers: dict[int, tuple[Optimizer, dict[str, Any]]] = {}
        self._modules: dict[int, _Module] = {}

    def keep(self, model: nn.Module) -> None:
        """Save the parameters, buffers and training flags of `model`, and clear its gradients.

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
        """Save the value and gradient of a tensor, and clear the gradient."""
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = tensor, tensor.detach().clone(), tensor.grad
            tensor.grad = None

    def _keep_optimizer(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = optimizer, copy.deepcopy(optimizer.state_dict())

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Save optimizers when they step in a block, and restore all saved state at its end."""
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
                if tensor.untyped_storage().nbytes() >= value.nbytes:  # otherwise its owner has freed it
                    tensor.copy_(value)
                tensor.grad = grad
        for module in self._modules.values():
            module.restore()
        self._tensors.clear()
        self._optimizers.clear()
        self._modules.clear()


@contextlib.contextmanager
def seeded(seed: int, device_type: str) -> Iterator[None]:
    """Seed torch and `random` for a block, and restore their state afterwards."""
    state = random.getstate()
    accelerator = torch.accelerator.current_accelerator()
    on_accelerator = accelerator is not None and accelerator.type == device_type
    devices = [torch.accelerator.current_device_index()] if on_accelerator else []
    with torch.random.fork_rng(devices, device_type=device_type if on_accelerator else "cpu"):
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
