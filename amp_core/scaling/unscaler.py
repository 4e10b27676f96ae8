"""What a scaler does to the gradients of optimizers that step as one: unscale, clip, prepare a fused step."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self

from amp_core._torch.steps import is_fused
from amp_core.common.arguments import as_max_norm, as_order, check_group
from amp_core.kernels.memory import on_host, read
from amp_core.scaling.arithmetic import is_tracing, overflows
from amp_core.scaling.distributed import Deciders, refuse_on_ranks
from amp_core.scaling.grad_passes import (
    Flags,
    GlobalGradStats,
    by_device,
    clip_factor,
    multiply_all_,
    multiply_and_flag_,
    read_gradients,
)
from amp_core.scaling.gradients import Gradients, describe_sharding, group_by_device, joined
from amp_core.scaling.loss_scales import Entry
from amp_core.scaling.mixed import refuse_mixed
from amp_core.scaling.overlap import Overlap
from amp_core.scaling.step_log import StepLog
from amp_core.states.loss_scale import OptState, next_stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Unscaler:
    """Reads and writes the gradients, and notes in the states of their optimizers what it found.

    `log` names the parameters and counts the updates; the other arguments are those of `GradScaler`.
    """

    _has_lost_group = False

    def __init__(
        self,
        log: StepLog,
        *,
        allow_fp16: bool,
        process_group: ProcessGroup | None,
        sharded_over: Mapping[ProcessGroup | DeviceMesh, Iterable[Tensor]] | None,
        overlap: bool,
    ) -> None:
        self.allow_fp16, self._log = allow_fp16, log
        self.process_group = None if process_group is None else check_group(process_group)
        if sharded_over is not None:
            describe_sharding(sharded_over, self.process_group)
        self._overlap = Overlap() if overlap else None

    def rehearsing(self, log: StepLog) -> Unscaler:
        """Return one for the steps of `log`, which reads the gradients only at the step."""
        copied = object.__new__(type(self))
        copied.__dict__ |= {**self.__dict__, "_log": log, "_overlap": None}
        return copied

    def __getstate__(self) -> dict[str, Any]:
        lost = self._has_lost_group or self.process_group is not None
        return {**self.__dict__, "process_group": None, "_has_lost_group": lost}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__ |= copy.deepcopy({**self.__dict__, "process_group": None}, memo)
        copied.process_group = self.process_group
        return copied

    def deciders(self, *optimizers: Optimizer) -> Deciders:
        """Return who decides whether `optimizers` step.

        Raises:
            ValueError: several ranks did, but pickling has lost their group.
        """
        if self._has_lost_group:
            refuse_on_ranks()
        return Deciders(self.process_group, optimizers, None if is_tracing() else self._log.updates)

    def unscale(
        self, optimizers: Sequence[Optimizer], inverse: Tensor, found_inf: Tensor, *, allow_fp16: bool
    ) -> Flags:
        """Multiply the gradients; return one overflow flag per device.

        Args:
            optimizers: whose.
            inverse: 0-dim float32, the inverse of the scale.
            found_inf: 0-dim float32 zero; its memory may become that of a flag.
            allow_fp16: take float16 gradients.
        """
        parts = joined([group_by_device(each, allow_fp16=allow_fp16) for each in optimizers])
        return multiply_all_(parts, inverse, found_inf, self.deciders(*optimizers))

    def clip(
        self, entry: Entry, max_norm: float, norm_type: float, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Unscale and clip the gradients; return their norm before. See `GradScaler.clip_grad_norm_`."""
        optimizers, _, scale, states = entry
        unscaled = all([state.stage is OptState.UNSCALED for state in states])
        refuse_mixed(entry)
        if not unscaled:
            for state in states:
                next_stage(state.stage, "unscale_")
        norm_type, max_norm = as_order(norm_type), as_max_norm(max_norm)
        deciders = self.deciders(*optimizers)
        groups = [group_by_device(each, allow_fp16=self.allow_fp16) for each in optimizers]
        parts = joined(groups)
        stats = read_gradients(parts, norm_type, scale.device, deciders, self._overlap)
        if error_if_nonfinite and not bool(stats.norm.isfinite()):
            raise RuntimeError(_NONFINITE_NORM.format(norm_type=norm_type))
        divisor = torch.ones_like(scale) if unscaled else scale
        norm, factor, stats = clip_factor(parts, stats, divisor, max_norm, norm_type, deciders)
        known = states if unscaled else []  # a step that raised has left flags of other gradients
        before = by_device([flag for state in known for flag in state.found_inf_per_device.items()])
        found = multiply_and_flag_(parts, factor, stats, before, deciders, allow_fp16=self.allow_fp16)
        for state in states:
            state.stage, state.found_inf_per_device, state.total_norm = OptState.UNSCALED, found, norm
        self._describe(entry, groups, stats)
        return norm

    def _describe(self, entry: Entry, groups: Sequence[Sequence[Gradients]], stats: GlobalGradStats) -> None:
        """Keep which gradients are not finite, for optimizers whose steps do not wait to look at them."""
        start = 0
        for optimizer, state, own in zip(entry.optimizers, entry.states, groups, strict=True):
            if is_fused(optimizer) and not is_tracing():
                state.nonfinite = self._log.describe(optimizer, own, stats.stats[start : start + len(own)])
            start += len(own)

    def find_divisor(self, entry: Entry, max_norm: float | None, norm_type: float) -> Tensor:
        """Read the gradients, note what was found, and return the number to divide them by in the step.

        Args:
            entry: one optimizer.
            max_norm: the divisor clips the gradients to this norm.
            norm_type: the order of the norm.
        """
        (optimizer,), _, scale, (state,) = entry
        norm_type = as_order(norm_type)
        if max_norm is not None:
            max_norm = as_max_norm(max_norm)
            refuse_mixed(entry)
        parts = group_by_device(optimizer, allow_fp16=True)
        deciders = self.deciders(optimizer)
        stats = read_gradients(parts, norm_type, scale.device, deciders, self._overlap)
        unscaled = state.stage is OptState.UNSCALED
        divisor = torch.ones_like(scale) if unscaled else scale
        clips = max_norm is not None
        known = unscaled or not (parts or stats.agreed)
        beyond = None if known else _overflows_unscaled(parts, stats, scale, clips=clips)
        if max_norm is not None:
            state.total_norm, divisor, stats = clip_factor(
                parts, stats, divisor, max_norm, norm_type, deciders, as_divisor=True
            )
        flags = [*state.found_inf_per_device.items(), *stats.flags.items()]
        if beyond is not None:
            flags.append((scale.device, beyond))
        state.found_inf_per_device = by_device(flags)
        if not is_tracing():
            state.nonfinite = self._log.describe(optimizer, parts, stats.stats)
        return divisor


def _overflows_unscaled(
    parts: Sequence[Gradients], stats: GlobalGradStats, scale: Tensor, *, clips: bool
) -> Tensor | None:
    """Return a flag if a scale below 1 may take gradients beyond their dtype; see `overflows`."""
    # Ranks that have agreed on the norm must not part because one of them has other dtypes.
    some = stats.dtype is torch.float64 and not stats.agreed
    wide = some and all([g.dtype is torch.float64 for part in parts for g in part.grads])
    if wide and clips and on_host(stats.norm) and math.isinf(read(stats.norm)):
        return None  # `clip_factor` tells whether only the squares are beyond float64
    return overflows(stats.norm, scale, wide=wide)


_NONFINITE_NORM = (
    "The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
    "cannot be clipped. To disable this error and scale the gradients by the non-finite norm "
    "anyway, set `error_if_nonfinite=False`"
)
