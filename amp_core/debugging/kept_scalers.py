"""Keep gradient scalers as they are while a step runs of which nothing remains."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from amp_core.common.replaced import Replaced
from amp_core.scaling.grad_scaler import GradScaler

Scaler = torch.amp.GradScaler

_USES = ("scale", "unscale_", "clip_grad_norm_", "step", "step_closure", "update", "load_state_dict")


class _Thread(threading.local):
    kept: dict[int, tuple[Scaler, dict[str, Any]]] | None = None


_here = _Thread()


@contextmanager
def scalers_kept() -> Iterator[None]:
    """Let each scaler that this thread uses in a block work on a copy of its state, until the block ends."""
    earlier, _here.kept = _here.kept, {}
    try:
        with _calls_replaced.block():
            yield
    finally:
        for scaler, state in _here.kept.values():
            vars(scaler).clear()
            vars(scaler).update(state)
        _here.kept = earlier


def _keep(scaler: Scaler) -> None:
    kept = _here.kept
    if kept is None or id(scaler) in kept or not scaler.is_enabled():
        return
    state = dict(vars(scaler))
    copied = {name: _copied(value) for name, value in state.items()}
    if isinstance(scaler, GradScaler):
        copied |= scaler._rehearsing()
    kept[id(scaler)] = scaler, state
    vars(scaler).update(copied)


def _copied(value: Any) -> Any:
    if isinstance(value, defaultdict):  # torch's state of each optimizer, which is of other gradients
        return defaultdict(value.default_factory)
    return value.clone() if isinstance(value, Tensor) else value


def _uses() -> Iterator[tuple[type[Any], str]]:
    """Yield each class of scalers with the name of a method in which it uses its state."""
    found: list[type[Any]] = [Scaler]
    for each in found:
        found += [kind for kind in each.__subclasses__() if kind not in found]
        yield from ((each, name) for name in _USES if name in vars(each))


def _kept_first(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(scaler: Scaler, *args: Any, **kwargs: Any) -> Any:
        _keep(scaler)
        return method(scaler, *args, **kwargs)

    return call


_calls_replaced = Replaced(_uses, _kept_first)
