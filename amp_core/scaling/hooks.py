"""Callbacks for steps, skipped steps and changes of the scale."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.hooks import RemovableHandle

from amp_core.plugin.default_manager import call_plugins, plugins_listen
from amp_core.scaling.step_record import StepRecord


@dataclass(frozen=True)
class ScaleChange:
    """A `GradScaler.update` that moved the scale.

    Attributes:
        number: the number of `GradScaler.update` calls before it.
        before: the scale before it.
        after: the scale after it.
        key: the key of the scale; ``None`` for the scale of losses without a key.
        rank: rank of this process in ``torch.distributed``; ``None`` if that is not initialised.
    """

    number: int
    before: float
    after: float
    key: str | None = None
    rank: int | None = None


StepHook = Callable[[Any, StepRecord], object]
"""Called with the `GradScaler` and the record."""

ScaleHook = Callable[[Any, ScaleChange], object]
"""Called with the `GradScaler` and the change."""


class Hooks:
    """The hooks of one scaler, and those of plugins, which are called for every scaler.

    Attributes:
        step: called for each step.
        skip: called for each skipped step.
        change: called for each update that moves the scale.
    """

    def __init__(self) -> None:
        self.step: OrderedDict[int, StepHook] = OrderedDict()
        self.skip: OrderedDict[int, StepHook] = OrderedDict()
        self.change: OrderedDict[int, ScaleHook] = OrderedDict()

    def exist(self) -> bool:
        """Whether there is any hook to call."""
        return bool(self.step or self.skip or self.change or plugins_listen())

    def call(
        self, scaler: object, records: Iterable[StepRecord], change: ScaleChange | None
    ) -> Exception | None:
        """Call all hooks in the order of registration; return the first error that one raises, log others."""
        errors: list[Exception] = []
        for record in records:
            errors += _call(self.step, "amp_step", scaler, record=record)
            if record.skipped:
                errors += _call(self.skip, "amp_skip", scaler, record=record)
        if change is not None:
            errors += _call(self.change, "amp_scale_change", scaler, change=change)
        for error in errors[1:]:
            logging.getLogger("amp_core").error("Another hook has raised an error, too.", exc_info=error)
        return errors[0] if errors else None


def add_hook(hooks: OrderedDict[int, Any], hook: Callable[..., object]) -> RemovableHandle:
    """Add `hook` to one kind of `Hooks`; the handle removes it."""
    if not callable(hook):
        raise TypeError(f"A hook must be callable with two arguments, got {type(hook).__name__}.")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _call(hooks: OrderedDict[int, Any], name: str, scaler: object, **event: object) -> list[Exception]:
    (what,) = event.values()
    calls: list[Callable[[], object]] = [partial(hook, scaler, what) for hook in hooks.values()]
    calls.append(partial(call_plugins, name, scaler=scaler, **event))
    errors = []
    for call in calls:
        try:
            call()
        except Exception as error:  # the other hooks are called all the same
            errors.append(error)
    return errors
