"""The loss scales of one scaler, and which of them the gradients of an optimizer have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.optim import Optimizer

from amp_core.common.arguments import check_optimizer
from amp_core.scaling.loss_scale import LossScale, check_saved
from amp_core.scaling.optimizer_state import OptimizerState
from amp_core.states.loss_scale import LossScaleSchedule, OptState


class Entry(NamedTuple):
    """The optimizers of one call, which step as one, with the scale of their gradients and their states.

    Attributes:
        optimizers: what the call was given.
        loss_scale: the scale of their gradients.
        scale: its present value; 0-dim float32.
        states: one for each optimizer.
    """

    optimizers: Sequence[Optimizer]
    loss_scale: LossScale
    scale: Tensor
    states: Sequence[OptimizerState]


class LossScales:
    """The scale of losses without a key, and one for each key.

    Args:
        init_scale: the initial value of each.
        schedule: how the one without a key moves, and those of keys that have no schedule of their own.
        schedules: key -> schedule.

    Attributes:
        own: the scale of losses without a key.
        keyed: key -> scale, for the keys that were used.
        in_window: the id of each optimizer with an open `AccumulationWindow`, and the key of its scale.
    """

    def __init__(
        self, init_scale: float, schedule: LossScaleSchedule, schedules: Mapping[str, LossScaleSchedule]
    ) -> None:
        if not isinstance(schedules, Mapping):
            raise TypeError(f"schedules= must map keys to schedules, not {schedules!r}.")
        for key in schedules:
            check_key(key)
        for each in (schedule, *schedules.values()):
            if not isinstance(each, LossScaleSchedule):
                raise TypeError(f"A schedule must be an amp_core.LossScaleSchedule, not {each!r}.")
        self.own = LossScale(init_scale, schedule)
        self.keyed: dict[str, LossScale] = {}
        self.in_window: dict[int, str | None] = {}
        self._init_scale, self._schedules = init_scale, dict(schedules)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "in_window": {}}  # no window closes on a copy

    def rehearsing(self) -> LossScales:
        """Return scales of the same values that move by themselves, for other gradients."""
        scales = LossScales(self._init_scale, self.own.schedule, self._schedules)
        scales.own = self.own.rehearsing()
        scales.keyed = {key: scale.rehearsing() for key, scale in self.keyed.items()}
        scales.in_window = self.in_window  # a window that has opened before may close on this
        return scales

    def for_loss(self, key: str | None) -> LossScale:
        """Return the scale for a loss with this key; its first use creates it.

        Raises:
            TypeError: `key` is not a string.
        """
        if key is None:
            return self.own
        check_key(key)
        known = self.keyed.get(key)
        # Of several threads that come first, all get the same.
        return self.keyed.setdefault(key, self._new(key)) if known is None else known

    def _new(self, key: str) -> LossScale:
        return LossScale(self._init_scale, self._schedules.get(key, self.own.schedule), key)

    def of(self, key: str | None) -> LossScale:
        """Return the scale of this key.

        Raises:
            ValueError: no loss was scaled under it.
            TypeError: it is not a string.
        """
        if key is None:
            return self.own
        check_key(key)
        if key not in self.keyed:
            known = ", ".join(map(repr, sorted(self.keyed))) or "none"
            raise ValueError(
                f"No loss was scaled under the key {key!r}; keys so far: {known}. "
                f"A key begins with scale(loss, key={key!r})."
            )
        return self.keyed[key]

    def enter(self, optimizers: Sequence[Optimizer], key: str | None, call: str) -> Entry:
        """Return `optimizers` with the scale of their gradients and their states: the start of every call.

        Raises:
            AssertionError: no loss was scaled yet; torch's text.
            ValueError: no loss was scaled under `key`; or it is missing, and all losses had keys; or there
                are no optimizers, or their gradients have different scales.
            RuntimeError: another key was given for one of them since the last update; or one has an open
                `AccumulationWindow`, or had one together with others that are not among them.
            TypeError: one is no optimizer.
        """
        check_optimizers(optimizers, call)
        if self.in_window:
            self.refuse_in_window(optimizers, call)
        loss_scale = self.own
        if key is not None or self.keyed:
            loss_scale, *others = [self._chosen(optimizer, key, call) for optimizer in optimizers]
            if any(other is not loss_scale for other in others):
                raise ValueError(_NOT_ONE.format(call=call, count=len(optimizers)))
        scale = loss_scale.check(call)
        states = [loss_scale.optimizer_states.of(each) for each in optimizers]
        if any([state.window is not None for state in states]):
            _check_together(optimizers, states)
        return Entry(optimizers, loss_scale, scale, states)

    def refuse_in_window(self, optimizers: Sequence[Optimizer], call: str) -> None:
        """Raise RuntimeError if one of `optimizers` has an open `AccumulationWindow`."""
        for each in optimizers:
            if id(each) in self.in_window:
                raise RuntimeError(_IN_WINDOW.format(call=call, of=f" of this {type(each).__name__}"))

    def _chosen(self, optimizer: Optimizer, key: str | None, call: str) -> LossScale:
        of_key = self.of(key)
        wanted = self.in_use(optimizer, key, call) or of_key
        if wanted is self.own and wanted.scale is None:
            raise ValueError(
                f"{call}() needs a key: losses were scaled under the keys "
                f"{', '.join(map(repr, sorted(self.keyed)))} and none without. Say whose scale the "
                f"gradients of this {type(optimizer).__name__} have: {call}(optimizer, key=...)."
            )
        return wanted

    def in_use(self, optimizer: Optimizer, key: str | None, call: str) -> LossScale | None:
        """Return the scale of the gradients of `optimizer` since the last update; None if none is known.

        Raises:
            RuntimeError: another key was given for them.
            TypeError: `key` is not a string.
        """
        if key is not None:
            check_key(key)
        found = None
        for loss_scale in (self.own, *self.keyed.values()):
            state = loss_scale.optimizer_states.known(optimizer)
            if state is not None and state.stage is not OptState.READY:
                if key is not None and loss_scale.key != key:
                    raise RuntimeError(_two_keys(call, key, loss_scale.key, optimizer))
                found = loss_scale
        return found

    def to_update(self, new_scale: float | Tensor | None, key: str | None) -> list[LossScale]:
        """Return the scales that `GradScaler.update` moves.

        Raises:
            RuntimeError: gradients in an open `AccumulationWindow` have one of them.
        """
        if key is not None or new_scale is not None or not self.keyed:
            scales = [self.of(key)]
        else:
            scales = [s for s in (self.own, *self.keyed.values()) if s.has_flags()] or [self.own]
        used = [*self.in_window.values()]
        if used and any(scale.key in used for scale in scales):
            raise RuntimeError(_IN_WINDOW.format(call="update", of=""))
        return scales

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all scales, those of keys under ``"_keys"``; waits for the device."""
        keyed = {key: self.keyed.get(key) or self._new(key) for key in {**self._schedules, **self.keyed}}
        state = self.own.state_dict()
        if keyed:
            state["_keys"] = {key: scale.state_dict() for key, scale in keyed.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check a state whole, then load it; see `GradScaler.load_state_dict`."""
        own = check_saved(state, self.own.schedule)
        saved = state.get("_keys", {})
        if not isinstance(saved, Mapping):
            raise TypeError(f'"_keys" of the state of a GradScaler must be a mapping, got {saved!r}.')
        keyed = {}
        for key, entry in saved.items():
            check_key(key)
            scale = self.keyed.get(key) or self._new(key)
            known = key in self.keyed or key in self._schedules
            keyed[key] = scale, check_saved(entry, scale.schedule if known else own.schedule)
        self.own.load(own)
        for key, (scale, checked) in keyed.items():
            scale.load(checked)
            self.keyed[key] = scale


def as_list(optimizer: Optimizer | Sequence[Optimizer]) -> Sequence[Optimizer]:
    """Return one optimizer, or several that step as one, as a list."""
    return optimizer if isinstance(optimizer, (list, tuple)) else [cast("Optimizer", optimizer)]


def check_optimizers(optimizers: Sequence[object], call: str) -> None:
    """Raise TypeError if one of `optimizers` is none, and ValueError if there are none."""
    for each in optimizers:
        check_optimizer(each, call)
    if not optimizers:
        raise ValueError(f"{call}() of 0 optimizers. Pass one, or those that step as one.")


def check_key(key: object) -> None:
    """Raise TypeError unless `key` can be that of a scale."""
    if not isinstance(key, str):
        raise TypeError(f"The key of a scale must be a string, got {key!r}.")


def _check_together(optimizers: Sequence[Optimizer], states: Sequence[OptimizerState]) -> None:
    given = set(map(id, optimizers))
    for optimizer, state in zip(optimizers, states, strict=True):
        window = state.window
        if window is not None and state.stage is OptState.READY and not window.optimizers <= given:
            raise RuntimeError(
                f"The gradients of this {type(optimizer).__name__} come from an AccumulationWindow of "
                f"{len(window.optimizers)} optimizers, which must step as one. Pass all of them to one call "
                f"of clip_grad_norm_() or unscale_(), then step each."
            )


_IN_WINDOW = (
    "{call}(){of} was called inside an AccumulationWindow, which weighs the gradients and reports an "
    "overflow when it closes. Leave the window first."
)
_NOT_ONE = (
    "{call}() of {count} optimizers: optimizers that step as one need one scale, so the losses of all must "
    "be scaled under the same key."
)


def _two_keys(call: str, key: str, before: str | None, optimizer: Optimizer) -> str:
    was = "no key" if before is None else f"the key {before!r}"
    return (
        f"{call}() was called with the key {key!r} for this {type(optimizer).__name__}, but its gradients "
        f"were treated as having the scale of {was} since the last update(). Gradients of one optimizer must "
        f"have one scale: scale all losses that reach its parameters under one key, or clear the gradients "
        f"and call update() in between."
    )
