"""Notice which scalers, schedulers and averages a step uses, of which nothing is to remain."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from amp_core.common.replaced import Replaced
from amp_core.scaling.grad_scaler import GradScaler

_SCALER = ("scale", "unscale_", "clip_grad_norm_", "step", "step_closure", "update", "load_state_dict")
_USES: dict[type[Any], tuple[str, ...]] = {
    torch.amp.GradScaler: _SCALER,
    LRScheduler: ("step",),
    AveragedModel: ("update_parameters",),
}


class _Thread(threading.local):
    keep: Callable[[Any], None] | None = None


_here = _Thread()


@contextmanager
def uses_noticed(keep: Callable[[Any], None]) -> Iterator[None]:
    """Call `keep` in a block with each scaler, scheduler and average before this thread changes it."""
    earlier, _here.keep = _here.keep, keep
    try:
        with _uses_replaced.block():
            yield
    finally:
        _here.keep = earlier


def attributes_for_a_while(used: Any) -> dict[str, Any]:
    """Return what `used`, a scaler or scheduler, can change in place of its attributes."""
    copied = {name: _copied(value) for name, value in vars(used).items()}
    if isinstance(used, GradScaler) and used.is_enabled():
        copied |= used._rehearsing()
    return copied


def schedulers_in(scheduler: LRScheduler) -> list[LRScheduler]:
    """Return the schedulers that `scheduler` consists of."""
    lists = [value for value in vars(scheduler).values() if isinstance(value, (list, tuple))]
    return [each for values in lists for each in values if isinstance(each, LRScheduler)]


def _copied(value: Any) -> Any:
    if isinstance(value, defaultdict):  # torch's state of each optimizer, which is of other gradients
        return defaultdict(value.default_factory)
    if isinstance(value, list):
        return [*value]
    return value.clone() if isinstance(value, Tensor) else value


def _uses() -> Iterator[tuple[type[Any], str]]:
    """Yield each class with the name of a method that changes its objects."""
    for base, names in _USES.items():
        found = [base]
        for each in found:
            found += [kind for kind in each.__subclasses__() if kind not in found]
            yield from ((each, name) for name in names if name in vars(each))


def _kept_first(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(used: Any, *args: Any, **kwargs: Any) -> Any:
        begins = isinstance(used, LRScheduler) and getattr(used, "last_epoch", 0) < 0  # in its constructor
        if _here.keep is not None and not begins:
            _here.keep(used)
        return method(used, *args, **kwargs)

    return call


_uses_replaced = Replaced(_uses, _kept_first)
