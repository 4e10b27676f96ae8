"""Gradient accumulation in which a micro-batch that overflows does not cost the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amp_core.scaling.arithmetic import combine
from amp_core.scaling.distributed import agree_on_flag, ranks_of
from amp_core.scaling.gradients import Gradients, gather
from amp_core.scaling.step_record import name_of
from amp_core.states.loss_scale import OptState

if TYPE_CHECKING:
    from amp_core.scaling.grad_scaler import GradScaler


class AccumulationWindow:
    """Check each micro-batch's gradients by themselves; leave out those that hold an inf or a NaN.

    Without it one bad micro-batch spoils the sum, and the whole step is skipped. With it the sum is that
    of the good ones, the step is taken, and the next `GradScaler.update` lowers the scale all the same.
    Where all are bad, the step is skipped. The step's record says which were bad, and in which parameters.

    Use it as a context around the micro-batches of one step, and `micro_batch` around each backward pass.
    Nothing waits for the device, but once where trained parameters get no gradient. It costs memory for a
    second set of gradients, three passes over them for each micro-batch, and one at the end.

    Under ``DistributedDataParallel`` every micro-batch must be reduced (no ``no_sync``): what a rank has
    added up without the others is no gradient of the model's.

    Args:
        scaler: scales the losses; where it is disabled, nothing is checked.
        optimizer: will step on the gradients.
        leave_out: ``False`` adds all micro-batches up as ever, and only records the first bad one.
        reweight: multiply the sum by all over good micro-batches, so that a mean stays one.
        key: of the losses, if they are scaled under one.
    """

    def __init__(
        self,
        scaler: GradScaler,
        optimizer: torch.optim.Optimizer,
        *,
        leave_out: bool = True,
        reweight: bool = True,
        key: str | None = None,
    ) -> None:
        self._scaler, self._optimizer, self._key = scaler, optimizer, key
        self._leave_out, self._reweight = leave_out, reweight
        held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self._params = [p for p in held.values() if p.requires_grad or p.grad is not None]
        self._ids = tuple(map(id, self._params))
        self._places: dict[tuple[int, ...], Tensor] = {}
        self._flags: list[Tensor] = []
        self._nonfinite: Tensor | None = None

    def __enter__(self) -> AccumulationWindow:
        self._flags, self._nonfinite = [], None
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._flags:
            self._close()

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Check the gradients that the block adds. What it added before it raised is left out.

        Raises:
            RuntimeError: the gradients were unscaled, or stepped on, since the last update.
            TypeError: a gradient is sparse or a DTensor.
        """
        if not self._scaler.is_enabled():
            yield
            return
        self._check_stage()
        kept = [p.grad for p in self._params]
        if self._leave_out:
            self._put([None] * len(kept))
        try:
            yield
            self._look()
        except BaseException:
            self._put(kept)
            raise
        if self._leave_out:
            self._put(self._sum(kept))

    def _check_stage(self) -> None:
        owner = self._owner_if_any()
        state = owner._per_optimizer_states.known(self._optimizer) if owner is not None else None
        if state is not None and state["stage"] is not OptState.READY:
            raise RuntimeError(
                f"A micro-batch cannot be added to gradients of this {type(self._optimizer).__name__} that "
                f"were unscaled or stepped on since the last update(): they have another scale. Call "
                f"unscale_, clip_grad_norm_ and step after the window."
            )

    def _owner_if_any(self) -> GradScaler | None:
        return self._scaler if self._key is None else self._scaler._keys.get(self._key)

    def _put(self, grads: list[Tensor | None]) -> None:
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = grad

    def _look(self) -> None:
        if any(p.grad is not None and p.grad.is_sparse for p in self._params):
            raise TypeError("An AccumulationWindow cannot take sparse gradients out of a sum.")
        parts = gather(self._optimizer, allow_fp16=True)
        if any(part.mesh is not None for part in parts):
            raise TypeError("An AccumulationWindow does not take DTensor gradients.")
        device = parts[0].device if parts else torch.device("cpu")
        measured = [part.grad_stats(2.0) for part in parts]
        flags = [m.found_inf for m in measured]
        ranks = ranks_of(parts, self._scaler._process_group)  # all leave out the same micro-batches
        self._flags.append(combine(flags, device) if ranks is None else agree_on_flag(flags, ranks, device))
        for part, measure in zip(parts, measured, strict=True):
            self._blame(part, measure.nonfinite.to(device, non_blocking=True))

    def _blame(self, part: Gradients, nonfinite: Tensor) -> None:
        if self._nonfinite is None:
            self._nonfinite = torch.zeros(len(self._params), device=nonfinite.device)
        ids = tuple(map(id, part.params))
        if ids == self._ids:
            self._nonfinite.add_(nonfinite)
            return
        if ids not in self._places:  # kept: the copy to the device may wait for it
            self._places[ids] = torch.tensor(list(map(self._ids.index, ids))).to(nonfinite.device)
        self._nonfinite.index_add_(0, self._places[ids], nonfinite)

    @torch.no_grad()
    def _sum(self, kept: list[Tensor | None]) -> list[Tensor | None]:
        bad = {flag.device: flag for flag in self._flags[-1:]}
        sums: list[Tensor | None] = []
        for before, param in zip(kept, self._params, strict=True):
            fresh = param.grad
            if fresh is None:
                sums.append(before)
                continue
            if fresh.device not in bad:
                bad[fresh.device] = self._flags[-1].to(fresh.device, non_blocking=True)
            fresh.masked_fill_(bad[fresh.device] > 0, 0)
            sums.append(fresh if before is None else before.add_(fresh))
        return sums

    @torch.no_grad()
    def _close(self) -> None:
        owner = self._owner_if_any()
        if owner is None or self._nonfinite is None:
            return
        flags = torch.stack([flag.to(self._flags[-1].device, non_blocking=True) for flag in self._flags])
        if self._leave_out:
            owner._per_optimizer_states.orphans.append(flags.amax(0))  # the scale goes down at the update
            self._weigh(flags)
        else:
            flags = flags.diff(prepend=torch.zeros_like(flags[:1])).clamp_(min=0)  # sums stay bad
        names = tuple((name_of(p, self._scaler._names), p.numel()) for p in self._params)
        state = owner._per_optimizer_states.of(self._optimizer)
        state["window"] = flags, names, self._nonfinite.clamp(max=1.0)

    def _weigh(self, flags: Tensor) -> None:
        good = flags.numel() - flags.sum()
        factor = flags.numel() / good if self._reweight else torch.ones_like(good)
        factor = torch.where(good > 0, factor, torch.nan)  # none is good: the step is to be skipped
        for param in self._params:
            if param.grad is not None:
                param.grad.mul_(factor.to(param.grad.device, non_blocking=True))
