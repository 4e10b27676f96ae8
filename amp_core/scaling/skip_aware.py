"""Let what follows an optimizer's step, a schedule or an average, leave out skipped steps."""

from __future__ import annotations

import operator
from typing import Any

from torch.optim import Optimizer

from amp_core.common.arguments import check_scaler, named
from amp_core.common.handle import Handle
from amp_core.scaling.grad_scaler import GradScaler


class _SkipAware(Handle):
    """Makes one method of an object do nothing after a skipped step, until `remove`.

    The object gets a subclass of its class: an attribute would become part of a scheduler's ``state_dict``.
    Copies and pickles of it have the class that it had.
    """

    def __init__(self, target: Any, method: str, scaler: GradScaler, optimizer: Optimizer | None) -> None:
        check_scaler(scaler, type(self).__name__)
        own = type(target)
        self._target, self._own = target, own
        self._scaler, self._optimizer = scaler, optimizer
        self._method, self._removed = getattr(own, method), False

        def call(_: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call(*args, **kwargs)

        def reduce(target: Any, _: object) -> Any:
            plain = object.__new__(own)
            plain.__dict__.update(vars(target))
            return operator.getitem, ((plain,), 0)  # pickle refuses an object of another class

        names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
        self._changed = type(own.__name__, (own,), {**names, method: call, "__reduce_ex__": reduce})
        target.__class__ = self._changed

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._removed:
            return self._method(self._target, *args, **kwargs)
        steps, optimizer = self._scaler.last_step, self._optimizer
        counts = self._scaler.is_enabled() and (bool(steps) if optimizer is None else optimizer in steps)
        if counts and not self._scaler.landed(optimizer):
            return None
        return self._method(self._target, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_changed": None}

    def remove(self) -> None:
        """Restore the method. Calling it again has no effect."""
        self._removed = True
        if type(self._target) is self._changed:  # else another one came later, or it was removed before
            self._target.__class__ = self._own


def _check_target(target: object, names: tuple[str, ...], function: str) -> None:
    missing = [name for name in names if not hasattr(target, name)]
    if missing:
        raise TypeError(
            f"{function}() takes what it holds back, with {' and '.join(names)}, and then the scaler: "
            f"{named(target)} has no {missing[0]}."
        )


class SkipAwareScheduler(_SkipAware):
    """Make the ``step`` of a learning-rate scheduler do nothing after a skipped optimizer step.

    Without it, the schedule runs ahead of the optimizer by the number of skipped steps, and torch warns
    about ``lr_scheduler.step()`` before ``optimizer.step()`` if the first one is skipped. It waits for the
    device if the optimizer's step did not. `remove`, or leaving it as a context, undoes it.

    Args:
        scheduler: anything with ``step`` and ``optimizer``, as in ``torch.optim.lr_scheduler``.
        scaler: steps that optimizer. Until its first step, the scheduler works as usual.

    Raises:
        TypeError: an argument has the wrong type.

    Example::

        from amp_core.callbacks import SkipAwareScheduler

        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=1000)
        SkipAwareScheduler(scheduler, scaler)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    """

    def __init__(self, scheduler: Any, scaler: GradScaler) -> None:
        _check_target(scheduler, ("step", "optimizer"), "SkipAwareScheduler")
        super().__init__(scheduler, "step", scaler, scheduler.optimizer)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the scheduler, unless the last step of its optimizer was skipped."""
        return self._call(*args, **kwargs)


class SkipAwareAverage(_SkipAware):
    """Make ``update_parameters`` of an averaged model do nothing after a skipped optimizer step.

    Without it, a skipped step counts the same weights again: an average over epochs weighs them twice, and
    an exponential one moves towards them. Otherwise like `SkipAwareScheduler`.

    Args:
        averaged: a ``torch.optim.swa_utils.AveragedModel``, or anything with ``update_parameters``.
        scaler: steps the optimizers of the model.
        optimizer: whose steps count; by default, all that stepped since the update before must have landed.

    Raises:
        TypeError: an argument has the wrong type.

    Example::

        from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
        from amp_core.callbacks import SkipAwareAverage

        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        SkipAwareAverage(averaged, scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        averaged.update_parameters(model)
    """

    def __init__(self, averaged: Any, scaler: GradScaler, optimizer: Optimizer | None = None) -> None:
        _check_target(averaged, ("update_parameters",), "SkipAwareAverage")
        super().__init__(averaged, "update_parameters", scaler, optimizer)

    def update_parameters(self, model: Any) -> None:
        """Average the parameters of `model`, unless the last step was skipped."""
        self._call(model)
