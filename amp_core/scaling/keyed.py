"""One scale for each of several losses, under one scaler."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from amp_core._torch import internals as _torch
from amp_core.scaling.arithmetic import is_tracing
from amp_core.scaling.scale import ScaleKeeper
from amp_core.states.loss_scale import LossScaleSchedule, OptState

if TYPE_CHECKING:
    from amp_core.scaling.grad_scaler import GradScaler


class KeyedScales(ScaleKeeper):
    """The part of `GradScaler` that has to do with keys; ``None`` is the key of its own scale."""

    _keys: dict[str, GradScaler]
    _schedules: Mapping[str, LossScaleSchedule]
    _first_scale: float

    def _start_keys(self, first_scale: float, schedules: Mapping[str, LossScaleSchedule]) -> None:
        self._first_scale = first_scale
        self._keys, self._schedules = {}, dict(schedules)

    def _new_key(self, key: str) -> GradScaler:
        """Return a scaler that differs from this one in its scale alone."""
        if not isinstance(key, str):
            raise TypeError(f"The key of a scale must be a string, got {key!r}.")
        own = cast("GradScaler", self)
        child = type(own).__new__(type(own))
        child.__dict__.update(own.__dict__)
        child._schedule = self._schedules.get(key, self._schedule)
        child._start(self._first_scale, 0)
        child._key, child._root, child._keys = key, own, {}
        child._hooks, child._in_a_row = self._hooks, self._in_a_row
        child.history, child.last_step = self.history, self.last_step
        return child

    def _making_key(self, key: str) -> GradScaler:
        if key not in self._keys:
            self._keys[key] = self._new_key(key)
        return self._keys[key]

    def _known_key(self, key: str) -> GradScaler:
        if key not in self._keys:
            known = ", ".join(map(repr, sorted(self._keys))) or "none"
            raise ValueError(
                f"No loss was scaled under the key {key!r}; keys so far: {known}. "
                f"A key begins with scale(loss, key={key!r})."
            )
        return self._keys[key]

    def _scaler_of(self, optimizer: torch.optim.Optimizer, key: str | None, call: str) -> GradScaler:
        """Return the scaler whose scale the gradients of `optimizer` have.

        Raises:
            ValueError: nothing was scaled under `key`; or it is left out, and only keys were used.
            RuntimeError: since the last update another key was given for this optimizer.
        """
        own = cast("GradScaler", self)
        if key is None and not self._keys:
            return own
        wanted = own if key is None else self._known_key(key)
        for holder in (own, *self._keys.values()):
            state = holder._per_optimizer_states.known(optimizer)
            if state is not None and state["stage"] is not OptState.READY:
                if key is not None and holder is not wanted:
                    raise RuntimeError(_two_keys(call, key, holder._key, optimizer))
                wanted = holder
        if wanted is own and self._scale is None:
            raise ValueError(
                f"{call}() needs a key: losses were scaled under the keys "
                f"{', '.join(map(repr, sorted(self._keys)))} and none without. Say whose scale the gradients "
                f"of this {type(optimizer).__name__} have: {call}(optimizer, key=...)."
            )
        wanted._updates = self._updates
        return wanted

    # -- the scale -------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None, key: str | None = None) -> None:
        """Move the scale: down after a skipped step, up after enough steps in a row; on the device.

        Args:
            new_scale: set the scale to this number or one-element tensor instead.
            key: move the scale of this key alone; by default each whose gradients were looked at since
                the last update, or with `new_scale` the scaler's own.

        Raises:
            AssertionError: no step or `unscale_` since the last update, or `new_scale` is no such tensor;
                torch's texts.
            ValueError: `new_scale` is a number, or a tensor on the CPU, that is not positive and finite (on
                other devices such a tensor leaves the scale as it is); nothing was scaled under `key`.
            ScaleFloorError: gradients overflowed at the floor, and the schedule says `AtFloor.RAISE`.
        """
        if self._has_records() if is_tracing() else _torch.frames_are_compiled() is not None:
            _update_eagerly(self, new_scale, key)  # they were made outside the graph
        else:
            self._update(new_scale, key)

    def _has_records(self) -> bool:
        each = (self, *self._keys.values()) if self._enabled else ()
        return any(scaler._since_update for scaler in each)

    def _update(self, new_scale: float | Tensor | None, key: str | None) -> None:
        if not self._enabled or (key is None and not self._keys):
            super().update(new_scale)
        elif key is not None:
            self._known_key(key).update(new_scale)
            self._updates += 1
        elif new_scale is not None:
            super().update(new_scale)
        else:
            self._update_all()

    def _update_all(self) -> None:
        used = [child for child in self._keys.values() if child._per_optimizer_states.found_infs()]
        own = bool(self._per_optimizer_states.found_infs())
        with ExitStack() as each:  # though one should raise
            for child in reversed(used):
                each.callback(child.update)
            if own or not used:
                super().update()
            else:
                self._updates += 1

    def get_scale(self, key: str | None = None) -> float:
        """Return the scale (of `key`), 1.0 if disabled; waits for the device."""
        if key is None or not self._enabled:
            return super().get_scale()
        return self._known_key(key).get_scale()

    # -- saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format, that of keys under ``"_keys"``; empty if disabled.

        Waits for the device.
        """
        state = super().state_dict()
        if self._enabled and self._keys:
            state["_keys"] = {key: child.state_dict() for key, child in self._keys.items()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict`, or torch's, returned; nothing is changed where an entry is missing.

        Raises:
            RuntimeError: it is empty; torch's text.
            KeyError: an entry is missing.
            ValueError: an entry is out of range.
        """
        keyed = state_dict.get("_keys", {}) if self._enabled else {}
        for key, state in keyed.items():
            self._new_key(key).load_state_dict(state)  # raises where it is wrong, before anything changes
        super().load_state_dict(state_dict)
        for key, state in keyed.items():
            self._making_key(key).load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled:
            for child in self._keys.values():
                child.__getstate__()  # refuses in the middle of an iteration
            state["_keys"] = {key: child.state_dict() for key, child in self._keys.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        keyed = state.get("_keys", {})
        super().__setstate__({**state, "_keys": {}})
        for key, saved in keyed.items():
            self._making_key(key).load_state_dict(saved)


_update_eagerly = _torch.outside_graphs(KeyedScales._update)


def _two_keys(call: str, key: str, before: str | None, optimizer: torch.optim.Optimizer) -> str:
    was = "no key" if before is None else f"the key {before!r}"
    return (
        f"{call}() was called with the key {key!r} for this {type(optimizer).__name__}, whose gradients were "
        f"taken to have the scale of {was} since the last update(). Gradients of one optimizer must have one "
        f"scale: scale all losses that reach its parameters under one key, or clear the gradients and call "
        f"update() in between."
    )
