"""The state of each optimizer between two updates, and one value copied to several devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import Self

from amp_core.common.identity import weak
from amp_core.scaling.arithmetic import is_tracing, moved
from amp_core.scaling.step_record import StepRecord
from amp_core.states.loss_scale import OptState


class _MultiDeviceReplicator:
    """Return a tensor on any device: itself on its own, elsewhere a copy made on first use."""

    def __init__(self, master_tensor: Tensor) -> None:
        self.master = master_tensor
        self._per_device_tensors: dict[torch.device, Tensor] = {}

    def get(self, device: torch.device) -> Tensor:
        """Return the copy on `device`."""
        copy = self._per_device_tensors.get(device)
        if copy is None:
            copy = moved(self.master, device)
            self._per_device_tensors[device] = copy
        return copy


class Unscaled(NamedTuple):
    """A snapshot at `unscale_`, to detect a later backward pass into the same gradients.

    Attributes:
        losses: how many losses had been scaled.
        first: the identity and the version of the first gradient; None if there is none.
    """

    losses: int
    first: tuple[int, int] | None


ParameterNames = tuple[tuple[str, int], ...]
"""(name, number of elements) of parameters."""


class Window(NamedTuple):
    """What the `AccumulationWindow` of a step found.

    Attributes:
        micro_batches: for each, 1.0 if it is bad, else 0.0.
        params: the parameters of the optimizer.
        nonfinite: for each of them, 1.0 if a gradient was not finite, else 0.0.
        left_out: whether bad micro-batches were left out of the sum.
        optimizers: the ids of those that lose the same micro-batches, and have to step as one.
    """

    micro_batches: Tensor
    params: ParameterNames
    nonfinite: Tensor
    left_out: bool
    optimizers: frozenset[int]

    def and_then(self, later: Window) -> Window:
        """Return what this and a later window of the same step found."""
        flags, names, bad, left_out, optimizers = later
        bad_before = self.nonfinite.to(bad.device)
        if self.params == names[: len(self.params)]:  # parameters may have been added
            bad = torch.maximum(bad, pad(bad_before, (0, len(bad) - len(bad_before))))
        else:
            names, bad = self.params + names, torch.cat([bad_before, bad])
        flags = torch.cat([self.micro_batches.to(flags.device), flags])
        return Window(flags, names, bad, self.left_out and left_out, self.optimizers | optimizers)


class Undo(NamedTuple):
    """The record of a step, the one before of the same optimizer, and what the record took from the state."""

    record: StepRecord
    before: StepRecord | None
    window: Window | None
    total_norm: Tensor | None
    nonfinite: tuple[ParameterNames, Tensor] | None


@dataclass(eq=False, slots=True)
class OptimizerState(MutableMapping[str, Any]):
    """What the scaler knows about one optimizer since the last update. It refers to no gradient.

    For code written for torch it is a mapping of ``"stage"``, ``"found_inf_per_device"`` and what that code
    adds.

    Attributes:
        stage: see `amp_core.states.loss_scale.next_stage`.
        found_inf_per_device: 1.0 where a gradient is not finite, else 0.0; one 0-dim flag per device.
        total_norm: the norm of the unscaled gradients before clipping, if it was computed.
        nonfinite: the parameters, and a flag for each, if they were computed.
        recorded: the `found_inf_per_device` of the last record.
        window: what `AccumulationWindow` found, if there was one since the last step.
        owner: the optimizer; None while Dynamo traces.
        unscaled: what the gradients were when they were unscaled last, for `refuse_mixed`.
        clipped: the arguments of a clipped step that raised, and what the gradients were then.
        undo: what `StepLog.withdraw` needs, after a record.
        delegated: whether a method of a subclass unscales the gradients now.
        added: what other code keeps here.
    """

    stage: OptState = OptState.READY
    found_inf_per_device: dict[torch.device, Tensor] = field(default_factory=dict)
    total_norm: Tensor | None = None
    nonfinite: tuple[ParameterNames, Tensor] | None = None
    recorded: dict[torch.device, Tensor] | None = None
    window: Window | None = None
    owner: Callable[[], torch.optim.Optimizer | None] | None = None
    unscaled: Unscaled | None = None
    clipped: tuple[float, float, list[tuple[int, int]]] | None = None
    undo: Undo | None = None
    delegated: bool = False
    added: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name) if name in _TORCH_NAMES else self.added[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in _TORCH_NAMES:
            setattr(self, name, value)
        else:
            self.added[name] = value

    def __delitem__(self, name: str) -> None:
        del self.added[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*_TORCH_NAMES, *self.added))

    def __len__(self) -> int:
        return len(_TORCH_NAMES) + len(self.added)

    def __eq__(self, other: object) -> bool:
        return self is other if isinstance(other, OptimizerState) else Mapping.__eq__(self, other)

    __hash__ = object.__hash__

    def restart(self) -> None:
        """Forget what was found: the gradients will be others."""
        self.stage, self.found_inf_per_device = OptState.READY, {}
        self.total_norm = self.nonfinite = None

    def flags(self) -> list[Tensor]:
        """Return the flags of all devices."""
        return list(self.found_inf_per_device.values())


_TORCH_NAMES = ("stage", "found_inf_per_device")


def as_state(state: OptimizerState | Mapping[str, Any]) -> OptimizerState:
    """Return a state in torch's form or ours."""
    if isinstance(state, OptimizerState):
        return state
    ours = OptimizerState()
    ours.update(state)
    return ours


def as_states(states: Mapping[int, OptimizerState | Mapping[str, Any]]) -> OptimizerStates:
    """Return states that a subclass of torch's scaler has set, in torch's form or ours."""
    if isinstance(states, OptimizerStates):
        return states
    ours = OptimizerStates()
    ours.fresh = getattr(states, "default_factory", None) or OptimizerState
    for key, state in states.items():
        ours[key] = state
    return ours


def _refresh_per_optimizer_state() -> dict[str, Any]:
    """Return a fresh state as torch's function of this name does."""
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class OptimizerStates(dict[int, OptimizerState]):
    """``id(optimizer)`` -> state, as torch's ``_per_optimizer_states``.

    An optimizer that gets the id of a collected one starts with a fresh state. The flags of the collected
    one still count at the next update; they are in `orphans`. What `fresh` returns is the state of an id
    that has none: a subclass of torch's scaler may have an enumeration of stages of its own.
    """

    fresh: Callable[[], OptimizerState | Mapping[str, Any]] = OptimizerState

    def __init__(self) -> None:
        super().__init__()
        self.orphans: list[Tensor] = []  # threads add to it while others do

    def __setitem__(self, key: int, state: OptimizerState | Mapping[str, Any]) -> None:
        ours = as_state(state)
        if ours.owner is not None and id(ours.owner()) != key:  # a wrapper's, for what it wraps
            ours.owner = None
        super().__setitem__(key, ours)

    def update(self, *states: Any, **_: Any) -> None:
        """Put in states in torch's form or ours; ``dict.update`` would go past `__setitem__`."""
        for key, state in dict[int, Any](*states).items():
            self[key] = state

    def __ior__(self, states: Any) -> Self:  # type: ignore[override,misc]
        self.update(states)
        return self

    def setdefault(self, key: int, default: Any = None) -> OptimizerState:
        """Return the state of `key`, after putting in `default` if there is none."""
        if key not in self:
            self[key] = default
        return self[key]

    def of(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Return the state of `optimizer`, a fresh one if it has none."""
        state = self.known(optimizer) if id(optimizer) in self else None
        if state is None:
            state = OptimizerState(owner=None if is_tracing() else weak(optimizer))
            super().__setitem__(id(optimizer), state)
        return state

    def known(self, optimizer: torch.optim.Optimizer) -> OptimizerState | None:
        """Return the state of `optimizer`, or None if it has none."""
        state = self.get(id(optimizer))
        if state is None or is_tracing() or state.owner is None or state.owner() is optimizer:
            return state
        del self[id(optimizer)]
        self.orphans.extend(state.flags())
        return None

    def __missing__(self, key: int) -> OptimizerState:
        self[key] = self.fresh()
        return self[key]

    def found_infs(self) -> list[Tensor]:
        """Return every flag recorded since the last update."""
        flags = [flag for state in self.values() for flag in state.found_inf_per_device.values()]
        return [*flags, *self.orphans]
