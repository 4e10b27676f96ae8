"""Tell whether gradients have changed since they were unscaled or clipped.

A backward pass may have added to unscaled ones: such sums are refused. Gradients that a step has clipped
before it raised are not clipped again.
"""

from __future__ import annotations

from torch.optim import Optimizer

from amp_core._torch.tensors import counts_writes, identity_of, version_of
from amp_core.common.optimizers import parameters_of
from amp_core.scaling.arithmetic import is_tracing
from amp_core.scaling.loss_scales import Entry
from amp_core.scaling.optimizer_state import Unscaled
from amp_core.states.loss_scale import OptState


def note_unscaled(entry: Entry) -> None:
    """Keep what `refuse_mixed` compares with; the gradients are unscaled now."""
    if not is_tracing():
        for optimizer, state in zip(entry.optimizers, entry.states, strict=True):
            state.unscaled = Unscaled(entry.loss_scale.losses, _first_gradient(optimizer))


def refuse_mixed(entry: Entry) -> None:
    """Look whether a loss was scaled and the first gradient has changed since the gradients were unscaled.

    Raises:
        RuntimeError: both are true: the gradients are sums of scaled and unscaled ones.
    """
    for optimizer, state in zip(entry.optimizers, entry.states, strict=True):
        before = state.unscaled
        if before is None or state.stage is not OptState.UNSCALED or is_tracing():
            continue
        now = _first_gradient(optimizer)
        changed = now not in (None, before.first) and counts_writes()  # None: all are cleared
        if changed and entry.loss_scale.losses != before.losses:
            raise RuntimeError(_MIXED.format(optimizer=type(optimizer).__name__))


def note_clipped(entry: Entry, max_norm: float | None, norm_type: float) -> None:
    """Keep, after a step that raised, what `is_clipped` compares with."""
    (optimizer,), (state,) = entry.optimizers, entry.states
    if max_norm is not None and not is_tracing():
        versions = _versions(optimizer)
        state.clipped = None if versions is None else (max_norm, norm_type, versions)


def is_clipped(entry: Entry, max_norm: float, norm_type: float) -> bool:
    """Whether a step that raised has clipped the gradients so, and nothing has changed them since."""
    (optimizer,), (state,) = entry.optimizers, entry.states
    if state.clipped is None or state.stage is not OptState.UNSCALED:
        return False
    return state.clipped == (max_norm, norm_type, _versions(optimizer))


def _versions(optimizer: Optimizer) -> list[tuple[int, int]] | None:
    grads = [param.grad for param in parameters_of(optimizer) if param.grad is not None]
    if any([grad.is_inference() for grad in grads]):  # which has no version
        return None
    return [(identity_of(grad), version_of(grad)) for grad in grads]


def _first_gradient(optimizer: Optimizer) -> tuple[int, int] | None:
    params = (param for group in optimizer.param_groups for param in group["params"])
    first = next((param.grad for param in params if param.grad is not None), None)
    if first is None or first.is_inference():  # which has no version
        return None
    return identity_of(first), version_of(first)


_MIXED = (
    "The gradients of this {optimizer} were unscaled or clipped since the last update(), and a backward pass "
    "has added scaled gradients to them since: their sum means nothing. Clip once for each step, after the "
    "last backward pass (with gradient accumulation: only where you step). To go on, clear the gradients and "
    "call update()."
)
