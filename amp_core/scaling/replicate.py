"""One value on several devices, and one state for each living optimizer."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from amp_core.states.loss_scale import OptState


class _MultiDeviceReplicator:
    """Hands out a tensor on each device: itself on its own, elsewhere a copy, made when first asked for."""

    def __init__(self, master_tensor: Tensor) -> None:
        self.master = master_tensor
        self._per_device_tensors: dict[torch.device, Tensor] = {}

    def get(self, device: torch.device) -> Tensor:
        """Return what is on `device`."""
        held = self._per_device_tensors.get(device)
        if held is None:
            held = self.master.to(device=device, non_blocking=True)
            self._per_device_tensors[device] = held
        return held


def _refresh_per_optimizer_state() -> dict[str, Any]:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class OptimizerStates(dict[int, dict[str, Any]]):
    """``id(optimizer)`` -> state, as torch's ``_per_optimizer_states``.

    An optimizer that gets the id of a collected one begins with a state of its own. The flags that the
    collected one recorded still count at the next update.
    """

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self.orphans: list[Tensor] = []

    def of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of `optimizer`, a fresh one if it has none."""
        state = self.known(optimizer)
        if state is None:
            state = self[id(optimizer)] = _refresh_per_optimizer_state()
            if not torch.compiler.is_dynamo_compiling():
                self._owners[id(optimizer)] = weakref.ref(optimizer)
        return state

    def known(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Return the state of `optimizer`, or None if it has none."""
        key = id(optimizer)
        if key not in self:
            return None
        owner = None if torch.compiler.is_dynamo_compiling() else self._owners.get(key)
        if owner is not None and owner() is not optimizer:
            self.orphans += self.pop(key)["found_inf_per_device"].values()
            return None
        return self[key]

    def __missing__(self, key: int) -> dict[str, Any]:
        state = self[key] = _refresh_per_optimizer_state()
        return state

    def found_infs(self) -> list[Tensor]:
        """Return every flag recorded since the last update."""
        own = [flag for state in self.values() for flag in state["found_inf_per_device"].values()]
        return own + self.orphans
