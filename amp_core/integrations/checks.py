"""What the integrations share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from amp_core import GradScaler
from amp_core.scaling.grad_scaler import OptState
from amp_core.scaling.mixed import refuse_mixed


def check_scaler(scaler: object) -> None:
    """Refuse a scaler that is not amp-core's: the integrations call methods that torch's lacks."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        kind = f"{type(scaler).__module__}.{type(scaler).__qualname__}"
        raise TypeError(f"scaler= takes an amp_core.GradScaler, not a {kind}.")


def finish_update(scaler: GradScaler | None) -> None:
    """Make the update that was left until all optimizers have stepped with gradients of one scale."""
    if scaler is None:
        return
    if any(state.stage is OptState.STEPPED for state in scaler._per_optimizer_states.values()):
        scaler.update()


def refuse_mixed_gradients(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Raise RuntimeError if a backward pass has added scaled gradients to unscaled ones of `optimizer`."""
    if scaler.is_enabled():
        refuse_mixed(scaler._scales.enter([optimizer], None, "clip_grad_norm_"))


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Give a module or an object of a library another attribute for a block."""
    own = name in vars(owner)  # else its class has it
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
