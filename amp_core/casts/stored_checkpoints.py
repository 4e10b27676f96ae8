"""What checkpoints of an optimizer have of the weights that are stored in bfloat16 for it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_core._torch.tensors import is_flattened
from amp_core.casts.last_writes import LastWrites
from amp_core.casts.storage import KEPT, Storage, packed, unpacked
from amp_core.common.optimizers import exact_states, numbered


class StoredCheckpoints:
    """Hooks that let ``state_dict`` of an optimizer have all that is kept, and load it bit for bit.

    Args:
        optimizer: gets the hooks, and a ``load_state_dict`` of its own.
        storage: how its weights are stored.
        state_dtype: the dtype of its states.
        first: what is kept beside parameters that have no state yet; a load may put entries in.
        params: returns the parameters that are stored now.
        writes: forgets all when other states are loaded.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        storage: Storage,
        state_dtype: torch.dtype,
        first: dict[Tensor, Tensor],
        params: Callable[[], Iterator[Tensor]],
        writes: LastWrites,
    ) -> None:
        self._optimizer, self._how, self._state_dtype = optimizer, storage, state_dtype
        self._first, self._params, self._writes = first, params, writes
        self._loaded: dict[str, Any] = {}
        load = types.MethodType(self._load_state_dict, optimizer)
        if "load_state_dict" not in vars(optimizer):
            optimizer.load_state_dict = load  # type: ignore[method-assign]
        self._before_load = optimizer.register_load_state_dict_pre_hook(self._remember)
        self._hooks = [
            optimizer.register_load_state_dict_post_hook(self._load_exactly, prepend=True),
            optimizer.register_state_dict_pre_hook(self._show_first),
            optimizer.register_state_dict_post_hook(self._pack, prepend=True),
            optimizer.register_state_dict_post_hook(self._hide_first, prepend=True),
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in (self._before_load, *self._hooks):
            hook.remove()
        self._hooks = []
        load = vars(self._optimizer).get("load_state_dict")
        if getattr(load, "__func__", None) == self._load_state_dict:
            del self._optimizer.load_state_dict

    def _show_first(self, optimizer: Optimizer) -> None:
        for param in self._params():
            if param in self._first:
                first = self._first[param]
                if optimizer.state.get(param):  # a program may put one in before the first step
                    del self._first[param]
                optimizer.state[param][KEPT] = first

    def _hide_first(self, optimizer: Optimizer, _state_dict: dict[str, Any]) -> None:
        for param in self._params():
            if param in self._first:
                del optimizer.state[param]

    def _pack(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Let `state_dict` have what is kept as checkpoints do; the optimizer's own states stay as is."""
        states = state_dict.get("state", {})
        flattened = {number for number, param in numbered(optimizer, state_dict) if is_flattened(param)}
        for key, state in states.items():
            if isinstance(state, dict) and KEPT in state:
                kept = state[KEPT]
                widened = key in flattened and kept.dtype is not self._state_dtype
                states[key] = {**state, KEPT: packed(kept, widened=widened)}

    def _load_state_dict(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Load what all hooks make of a checkpoint: one that matches names may come after this handle's."""
        if self._hooks:  # or a caller has kept this method
            self._before_load.remove()
            self._before_load = optimizer.register_load_state_dict_pre_hook(self._remember)
        return type(optimizer).load_state_dict(optimizer, *args, **kwargs)

    def _remember(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._loaded = state_dict
        states = state_dict["state"].items()  # Adam takes any state of a parameter for one that has begun
        begun = {key: s for key, s in states if not isinstance(s, dict) or s.keys() != {KEPT}}
        return {**state_dict, "state": begun}

    def _load_exactly(self, optimizer: Optimizer) -> None:
        """Give the loaded states their own dtypes back: torch casts them to that of the parameter."""
        loaded, self._loaded = self._loaded, {}
        self._first.clear()
        self._writes.clear()  # what is loaded may be of other weights
        # A class that loads in its own way may look for each entry afterwards.
        plain = type(optimizer).load_state_dict is Optimizer.load_state_dict
        stored = {*self._params()}
        for param, state in exact_states(optimizer, loaded):
            if param not in stored:
                continue
            if KEPT in state:
                state[KEPT] = unpacked(state[KEPT], param, self._how)
            if plain and param not in optimizer.state and KEPT in state:
                self._first[param] = state[KEPT]
            elif state:
                optimizer.state[param].update(state)
