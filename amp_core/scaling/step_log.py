"""The log of a scaler: records of steps, hooks, and warnings about steps that keep being skipped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_core._torch.tracing import is_fake
from amp_core.common.arguments import as_whole, named_tensors
from amp_core.common.call_site import level_outside
from amp_core.common.identity import WeakIdentityMapping, weak
from amp_core.common.text import counted
from amp_core.errors import ScaleFloorError, ScaleFloorWarning, SkippedStepsWarning
from amp_core.kernels import GradStats
from amp_core.kernels.memory import on_host, read
from amp_core.scaling.arithmetic import combine, moved, snapshot
from amp_core.scaling.gradients import Gradients, group_by_device
from amp_core.scaling.hooks import Hooks, ScaleChange
from amp_core.scaling.loss_scale import LossScale
from amp_core.scaling.optimizer_state import OptimizerState, ParameterNames, Undo, Window
from amp_core.scaling.step_record import (
    BadParameter,
    History,
    StepRecord,
    count_nonfinite,
    fetch,
    name_of,
    rank,
    worst,
)
from amp_core.states.loss_scale import AtFloor, OptState, float32

_REUSED = 16
"""So many numbers of optimizers are looked at for a free one: a look at all would take long for thousands."""


class StepLog:
    """Records of all steps of a scaler, whatever their key.

    Attributes:
        history: the last steps.
        last_step: the last step of each optimizer.
        names: ``id(parameter)`` -> name.
        warn_after: warn after this many skipped steps in a row; 0 for never.
        hooks: who is called.
        updates: the number of `GradScaler.update` calls so far.
        tells: whether it warns and calls hooks.
    """

    def __init__(
        self, size: int | None, warn_after: int, named_parameters: Iterable[tuple[str, Tensor]]
    ) -> None:
        self.names = {id(p): name for name, p in named_tensors(named_parameters)}
        self.warn_after = as_whole(warn_after, "warn_after", 0)
        self.updates = 0
        self._start(None if size is None else as_whole(size, "history", 0))

    def _start(self, size: int | None) -> None:
        self.tells = True
        self.history = History(size)
        self.hooks = Hooks()
        # by identity: optimizers that compare, such as dataclasses, have no hash
        self.last_step: WeakIdentityMapping[Optimizer, StepRecord] = WeakIdentityMapping(_no_record)
        self._named: dict[tuple[str | None, str], list[Callable[[], Optimizer | None]]] = {}
        self._pending: dict[str | None, dict[int, StepRecord]] = {}
        self._skips_in_a_row: MutableMapping[Optimizer, int] = WeakIdentityMapping()
        self._described: MutableMapping[Optimizer, tuple[list[int], ParameterNames]] = WeakIdentityMapping()

    def __getstate__(self) -> dict[str, Any]:
        # ids, hooks and tensors of this process mean nothing in another
        return {"warn_after": self.warn_after, "updates": self.updates, "size": self.history.size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.names = {}
        self.warn_after, self.updates = state["warn_after"], state["updates"]
        self._start(state["size"])

    def rehearsing(self) -> StepLog:
        """Return a log for steps of which nothing remains: it knows the last ones, and tells nobody."""
        log = StepLog(self.history.size, 0, ())
        log.names, log.updates, log.tells = self.names, self.updates, False
        log.last_step.update(self.last_step)
        return log

    # -- at a step -------------------------------------------------------------------------------

    def record(self, optimizer: Optimizer, loss_scale: LossScale, state: OptimizerState) -> StepRecord:
        """Record a step of `optimizer`; does not wait for the device."""
        scale = loss_scale.check("step")
        window, norm, nonfinite = state.window, state.total_norm, state.nonfinite
        flag = combine(state.flags(), scale.device)
        is_known = on_host(flag, scale)
        before = self.last_step.get(optimizer)
        record = StepRecord(
            self.updates,
            before.optimizer if before is not None else self._new_name(optimizer, loss_scale.key),
            flag,
            read(scale) if is_known else scale.clone(),
            _total_norm=norm,
            key=loss_scale.key,
            _lost=getattr(optimizer, "_amp_core_lost_updates", None),  # the step fills it
            _device=scale.device,
        )
        _note_bad(record, window, nonfinite)
        if is_known and read(flag):  # at the update, the gradients may be others
            record._bad = self.bad_parameters(optimizer) or None
        # A fused step that raised has clipped nothing, so the next attempt finds norm and flags itself.
        found = (norm, nonfinite) if state.stage is OptState.UNSCALED else (None, None)
        state.undo = Undo(record, before, window, *found)
        pending = self._pending.setdefault(loss_scale.key, {})
        other = pending.pop(id(optimizer), None)
        if other is not None and other is not before:  # of a collected optimizer that had this id
            pending[id(other)] = other
        pending[id(optimizer)] = record  # first: from here on, `withdraw` undoes what an interrupt breaks off
        self.last_step[optimizer] = record
        self.history.append(record)
        state.window = state.total_norm = state.nonfinite = None
        state.recorded = state.found_inf_per_device
        return record

    def _new_name(self, optimizer: Optimizer, key: str | None) -> str:
        """Return the name of an optimizer that has not stepped yet: its class and the first free number."""
        name = type(optimizer).__name__
        named = self._named.setdefault((key, name), [])
        while named and named[-1]() is None:
            named.pop()
        first = (i for i, ref in enumerate(named[:_REUSED]) if ref() is None or ref() is optimizer)
        index = next(first, len(named))
        named[index : index + 1] = [weak(optimizer)]
        return name if index == 0 else f"{name}_{index + 1}"

    def withdraw(self, optimizer: Optimizer, loss_scale: LossScale, state: OptimizerState) -> None:
        """Forget the record of a step that raised, and give `state` back what the record took from it."""
        undo, state.undo = state.undo, None
        pending = self._pending.get(loss_scale.key, {})
        if undo is None or pending.get(id(optimizer)) is not undo.record:  # an update in the step has told it
            return
        del pending[id(optimizer)]
        if not pending:
            del self._pending[loss_scale.key]
        self.history.remove(undo.record)
        if undo.before is None:
            del self.last_step[optimizer]
        else:
            self.last_step[optimizer] = undo.before
        state.window, state.total_norm, state.nonfinite = undo.window, undo.total_norm, undo.nonfinite
        state.recorded = None

    def skipped(self, optimizer: Optimizer) -> bool:
        """Return whether the step that was recorded is to be skipped, and note why; waits for the device."""
        record = self.last_step[optimizer]
        skipped = record.skipped
        if skipped and record._bad is None:
            record._bad = self.bad_parameters(optimizer)
        return skipped

    def landed(self, optimizer: Optimizer | None) -> Tensor:
        """Return whether the last step was taken; see `GradScaler.landed`."""
        known = self.last_step
        if optimizer is not None:
            records = [known[optimizer]] if optimizer in known else []
        else:
            latest = max((record.number for record in known.values()), default=0)
            records = [record for record in known.values() if record.number == latest]
        if not records:
            whose = "" if optimizer is None else f" of this {type(optimizer).__name__}"
            raise RuntimeError(_NO_STEP.format(whose=whose))
        landed = [record.landed for record in records]
        return torch.stack([moved(each, landed[0].device) for each in landed]).all()

    def bad_parameters(self, optimizer: Optimizer) -> tuple[BadParameter, ...]:
        """Return the parameters whose gradients are not finite; waits for the device."""
        parts = group_by_device(optimizer, allow_fp16=True)
        return tuple(b for p in parts for b in count_nonfinite(p.params, p.grads, self.names))

    def describe(
        self, optimizer: Optimizer, parts: Sequence[Gradients], stats: Sequence[GradStats]
    ) -> tuple[ParameterNames, Tensor] | None:
        """Return the names of the parameters, and on the device which of their gradients are not finite."""
        if not parts:
            return None
        params = [p for part in parts for p in part.params]
        ids = list(map(id, params))
        known = self._described.get(optimizer)
        if known is None or known[0] != ids:  # all records of the same parameters share the names
            known = (ids, tuple((name_of(p, self.names), p.numel()) for p in params))
            self._described[optimizer] = known
        if len(stats) == 1:
            return known[1], stats[0].nonfinite
        flags = [moved(s.nonfinite, stats[0].nonfinite.device) for s in stats]
        return known[1], torch.cat(flags)

    # -- at an update ----------------------------------------------------------------------------

    def has_pending(self) -> bool:
        """Whether a step was recorded since the last update."""
        return bool(self._pending)

    def scale_before(self, loss_scale: LossScale) -> Tensor | None:
        """Return a copy of the scale if a hook will need it and no record has it."""
        if loss_scale.key in self._pending or not self.hooks.exist() or loss_scale.scale is None:
            return None
        return loss_scale.scale.clone()

    def close(self, scaler: object, loss_scale: LossScale, before: Tensor | None) -> None:
        """Complete the records since the last update: warn, call hooks.

        Args:
            scaler: passed to hooks.
            loss_scale: has moved.
            before: from `scale_before`.

        Raises:
            ScaleFloorError: gradients overflowed at the floor, and the schedule says `AtFloor.RAISE`.
            Warning: the filters make it an error; counters and hooks know of the steps all the same.
        """
        pending = self._pending.pop(loss_scale.key, {}).copy()  # another thread may record a step meanwhile
        records = list(pending.values())
        if records:
            after = snapshot(loss_scale.check("update"))
            for record in records:
                record._scale_after = after
        if not self.tells:
            return
        hooks = self.hooks.exist()
        if hooks or loss_scale.schedule.at_floor is not AtFloor.WARN:
            flags = (before, *[record._found_inf for record in records])
            if any(is_fake(flag) for flag in flags if isinstance(flag, Tensor)):
                hooks = False  # there is nothing to tell
            else:
                fetch(records)
        told: list[Warning] = []  # those that the filters make errors, raised when all is counted
        skipped = [record for number, record in pending.items() if self._count(number, record, told)]
        error = self._check_floor(loss_scale, skipped[-1], records) if skipped else None
        error = error or next(iter(told), None)
        raised = None
        if hooks:
            raised = self.hooks.call(scaler, records, self._change(loss_scale, records, before))
        if error is not None:
            error.__context__ = raised
            raise error
        if raised is not None:
            raise raised

    def _count(self, number: int, record: StepRecord, told: list[Warning]) -> bool:
        """Count skips in a row, unless the host would have to wait; return whether the step was skipped."""
        flag = record._found_inf
        if isinstance(flag, Tensor):
            if not on_host(flag):
                return False
            record._found_inf = flag = read(flag)
        if flag or self._skips_in_a_row:
            owner = self.last_step.key_of(number)
            if owner is not None and self.last_step.get(owner) is record:
                row = self._skips_in_a_row.pop(owner, 0) + 1
                if record.skipped:
                    self._skips_in_a_row[owner] = row
                    told += self._explain(record, owner, row)
        return bool(flag)

    def _explain(self, record: StepRecord, owner: Optimizer, row: int) -> list[Warning]:
        if record._bad is None:
            known, now = record.bad_parameters, self.bad_parameters(owner)
            if not known or {bad.name for bad in known} == {bad.name for bad in now}:  # else they are others
                record._bad = now or record._bad
        return _warn(_endless(row, record), SkippedStepsWarning) if row == self.warn_after else []

    def _change(
        self, loss_scale: LossScale, records: Sequence[StepRecord], before: Tensor | None
    ) -> ScaleChange | None:
        if records:
            last = records[-1]
            old, new = last.scale_before, last.scale_after or last.scale_before
        elif before is not None and loss_scale.scale is not None:
            old, new = torch.stack([before, loss_scale.scale]).tolist()
        else:
            return None
        return None if old == new else ScaleChange(self.updates - 1, old, new, loss_scale.key, rank())

    def _check_floor(
        self, loss_scale: LossScale, record: StepRecord, records: Sequence[StepRecord]
    ) -> Exception | None:
        schedule = loss_scale.schedule
        floor, action = float32(schedule.min_scale), schedule.at_floor
        chosen = action is not AtFloor.WARN or floor < schedule.max_scale
        was_there, loss_scale.at_floor = loss_scale.at_floor, chosen and record.scale_before <= floor
        if not loss_scale.at_floor:
            return None
        text = _stuck(record, action)
        if action is AtFloor.RAISE:
            return ScaleFloorError(text)
        if action is AtFloor.STOP:
            loss_scale.stop()
            for each in records:
                each._scale_after = 1.0
        warns = action is AtFloor.STOP or not was_there
        return next(iter(_warn(text, ScaleFloorWarning)), None) if warns else None


def _warn(text: str, category: type[Warning]) -> list[Warning]:
    """Warn; return the warning if the filters make it an error."""
    try:
        warnings.warn(text, category, stacklevel=level_outside())
    except Warning as error:
        return [error]
    return []


def _note_bad(
    record: StepRecord, window: Window | None, nonfinite: tuple[ParameterNames, Tensor] | None
) -> None:
    """Note which micro-batches are bad, and which parameters."""
    if window is not None:
        record._micro_batches, names, bad, record._left_out, _ = window
        landed = moved(record.landed, bad.device)
        # Of a skipped step, only what is bad in the sum is told.
        if nonfinite is not None:
            rest, now = nonfinite
            names, bad = names + rest, torch.cat([bad * landed, moved(now, bad.device)])
        elif window.left_out:
            bad = bad * (landed | moved(window.micro_batches.all(), bad.device))
        nonfinite = names, bad
    if nonfinite is not None:
        record._params, record._nonfinite = nonfinite


_NO_STEP = (
    "landed(): this scaler has recorded no step{whose} yet. Call it after scaler.step(optimizer); a step "
    "inside a torch.compile graph leaves no record."
)


def _no_record(optimizer: Optimizer) -> str:
    return (
        f"last_step: this scaler has recorded no step of this {type(optimizer).__name__}. Read it "
        f"after scaler.step(optimizer). A disabled scaler and a torch.compile graph record no step."
    )


def _endless(count: int, record: StepRecord) -> str:
    return (
        f"{counted(count, 'step was', 'steps in a row were')} skipped: the gradients hold inf or NaN at a "
        f"scale of {record.scale_before:g}. In the last one: {worst(record)}. Lowering the scale does not "
        f"help against a NaN in the model or a loss that overflows by itself. To find the first operation "
        f"that is not finite, run the step under amp_core.compare."
    )


def _stuck(record: StepRecord, action: AtFloor) -> str:
    stops = " The scale is 1 from now on and does not move; steps are still checked."
    return (
        f"The gradients of this {record.optimizer} hold inf or NaN although the scale is at its floor, "
        f"{record.scale_before:g} (LossScaleSchedule.min_scale): {worst(record)}. A smaller scale would not "
        f"help: look for a NaN in the model, a loss that overflows by itself, or too high a learning rate."
        f"{stops if action is AtFloor.STOP else ''}"
    )
