"""What is done about the steps since the last update: hooks, and warnings where skips do not end."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from amp_core.common.call_site import level_outside
from amp_core.errors import ScaleFloorError, ScaleFloorWarning, SkippedStepsWarning
from amp_core.scaling.gradients import Gradients, gather
from amp_core.scaling.hooks import Hooks, ScaleChange, ScaleHook, StepHook
from amp_core.scaling.step_record import BadParameter, StepRecord, bad_parameters, fetch, name_of, rank, worst
from amp_core.states.loss_scale import AtFloor, LossScaleSchedule, float32

if TYPE_CHECKING:
    from amp_core.kernels import GradStats
    from amp_core.scaling.grad_scaler import GradScaler


class Reporting(torch.amp.GradScaler):
    """The part of `GradScaler` that tells of what happened."""

    _enabled: bool
    _schedule: LossScaleSchedule
    _scale: Tensor | None
    _names: dict[int, str]
    _warn_after: int
    _updates: int
    _key: str | None = None
    _root: GradScaler | None = None
    _at_floor = False
    last_step: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepRecord]

    def _start_reporting(self) -> None:
        self._hooks = Hooks()
        self._in_a_row: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._described: weakref.WeakKeyDictionary[
            torch.optim.Optimizer, tuple[list[int], tuple[tuple[str, int], ...]]
        ] = weakref.WeakKeyDictionary()

    # -- who listens -----------------------------------------------------------------------------

    def register_step_hook(self, hook: StepHook) -> RemovableHandle:
        """Call ``hook(scaler, record)`` in each `update`, for each step since the last one.

        The hook comes last, when the record is complete and the scale has moved; what it raises comes out
        of `update`. While anybody listens, `update` waits for the device once; else not at all. A scaler
        that is disabled calls no hook, nor does an `update` inside a compiled graph.

        Returns:
            a handle: ``handle.remove()``, or ``with handle:``.
        """
        return self._listeners().on_step(hook)

    def register_skip_hook(self, hook: StepHook) -> RemovableHandle:
        """Call ``hook(scaler, record)`` for each step that was skipped; as `register_step_hook`."""
        return self._listeners().on_skip(hook)

    def register_scale_change_hook(self, hook: ScaleHook) -> RemovableHandle:
        """Call ``hook(scaler, change)`` in each `update` that moves the scale; as `register_step_hook`."""
        return self._listeners().on_scale_change(hook)

    def _listeners(self) -> Hooks:
        return self._hooks if self._enabled else Hooks()

    # -- at each update --------------------------------------------------------------------------

    def _report(self, records: Sequence[StepRecord], before: Tensor | None) -> None:
        heard = self._hooks.anyone()
        if heard or self._schedule.at_floor is not AtFloor.WARN:
            fetch(records)
        skipped = [record for record in records if self._judge(record)]
        error = self._look_at_floor(skipped[-1], records) if skipped else None
        if heard:
            self._hooks.tell(self._root or cast("GradScaler", self), records, self._change(records, before))
        if error is not None:
            raise error

    def _judge(self, record: StepRecord) -> bool:
        """Count the skips in a row, where the host need not wait to know; return whether this is one."""
        flag = record._found_inf
        if isinstance(flag, Tensor):
            if flag.device.type != "cpu":
                return False
            record._found_inf = cast(float, flag.tolist())
        if record.skipped or self._in_a_row:
            self._count(record)
        return record.skipped

    def _count(self, record: StepRecord) -> None:
        owner = next((o for o, last in self.last_step.items() if last is record), None)
        if owner is None:
            return
        row = self._in_a_row.pop(owner, 0) + 1
        if record.skipped:
            self._in_a_row[owner] = row
            self._blame(record, owner, row)

    def _blame(self, record: StepRecord, owner: torch.optim.Optimizer, row: int) -> None:
        if record._bad is None and record._micro_batches is None:
            record._bad = self._bad_parameters(owner) or None
        if row == self._warn_after:
            warnings.warn(_endless(row, record), SkippedStepsWarning, stacklevel=level_outside())

    def _bad_parameters(self, optimizer: torch.optim.Optimizer) -> tuple[BadParameter, ...]:
        parts = gather(optimizer, allow_fp16=True)
        return tuple(b for p in parts for b in bad_parameters(p.params, p.grads, self._names))

    def _change(self, records: Sequence[StepRecord], before: Tensor | None) -> ScaleChange | None:
        if records:
            last = records[-1]
            old, new = last.scale_before, last.scale_after or last.scale_before
        elif before is not None and self._scale is not None:
            old, new = torch.stack([before, self._scale]).tolist()
        else:
            return None
        return None if old == new else ScaleChange(self._updates - 1, old, new, self._key, rank())

    def _look_at_floor(self, record: StepRecord, records: Sequence[StepRecord]) -> ScaleFloorError | None:
        floor, then = float32(self._schedule.min_scale), self._schedule.at_floor
        chosen = then is not AtFloor.WARN or floor < self._schedule.max_scale
        was, self._at_floor = self._at_floor, chosen and record.scale_before <= floor
        if not self._at_floor:
            return None
        text = _stuck(record, then)
        if then is AtFloor.RAISE:
            return ScaleFloorError(text)
        if then is AtFloor.STOP:
            self._stop_scaling(records)
        if then is AtFloor.STOP or not was:
            warnings.warn(text, ScaleFloorWarning, stacklevel=level_outside())
        return None

    def _stop_scaling(self, records: Sequence[StepRecord]) -> None:
        self._schedule = replace(self._schedule, min_scale=1.0, max_scale=1.0, at_floor=AtFloor.WARN)
        self._check_scale_growth_tracker("update")[0].fill_(1.0)
        for record in records:
            record._scale_after = 1.0

    # -- what a fused step leaves ----------------------------------------------------------------

    def _describe(
        self,
        record: StepRecord,
        optimizer: torch.optim.Optimizer,
        looked: tuple[list[Gradients], list[GradStats]] | None,
    ) -> None:
        """Note which gradients were not finite, on the device, and whose they are."""
        parts, measured = looked or ([], [])
        if not parts or record._params:
            return
        params = [param for part in parts for param in part.params]
        ids = list(map(id, params))
        held = self._described.get(optimizer)
        if held is None or held[0] != ids:  # the names are shared by all records of the same parameters
            held = (ids, tuple((name_of(p, self._names), p.numel()) for p in params))
            self._described[optimizer] = held
        flags = [m.nonfinite.to(measured[0].nonfinite.device, non_blocking=True) for m in measured]
        record._params, record._nonfinite = held[1], flags[0] if len(flags) == 1 else torch.cat(flags)


def _endless(count: int, record: StepRecord) -> str:
    return (
        f"{count} steps in a row were skipped: the gradients hold inf or NaN at a scale of "
        f"{record.scale_before:g}. In the last one: {worst(record)}. A scale that keeps falling does not "
        f"help against a NaN in the model or a loss that overflows by itself."
    )


def _stuck(record: StepRecord, then: AtFloor) -> str:
    stops = " The scale is 1 from now on and does not move; steps are still checked."
    return (
        f"The gradients of this {record.optimizer} hold inf or NaN though the scale is at its floor, "
        f"{record.scale_before:g} (LossScaleSchedule.min_scale): {worst(record)}. A smaller scale would not "
        f"help: look for a NaN in the model, a loss that overflows by itself, or too high a learning rate."
        f"{stops if then is AtFloor.STOP else ''}"
    )
