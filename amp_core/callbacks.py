"""Ready-made callbacks: write the steps of a scaler to TensorBoard, W&B, MLflow, a JSONL file or a log.

Attach one to a single scaler with ``JsonLines(path).listen(scaler)``, or to all scalers with
``amp_core.plugin.register(JsonLines(path))``. While a callback is attached, each `GradScaler.update` waits
once for the device.
"""

from __future__ import annotations

import importlib
import json
import logging
import operator
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_core.common.handle import Handle
from amp_core.common.text import json_value
from amp_core.plugin import hookimpl

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.tensorboard import SummaryWriter

    from amp_core.scaling.grad_scaler import GradScaler
    from amp_core.scaling.hooks import ScaleChange
    from amp_core.scaling.step_record import StepRecord

__all__ = ["JsonLines", "Logging", "MLflow", "SkipAwareAverage", "SkipAwareScheduler", "TensorBoard", "WandB"]


class Listener(ABC):
    """Base of the callbacks."""

    @abstractmethod
    def amp_step(self, scaler: GradScaler, record: StepRecord) -> None:
        """Handle a step."""

    @abstractmethod
    def amp_scale_change(self, scaler: GradScaler, change: ScaleChange) -> None:
        """Handle a change of the scale."""

    def listen(self, scaler: GradScaler) -> ExitStack:
        """Attach to `scaler`.

        Returns:
            A context manager; closing or leaving it detaches.

        Example::

            with JsonLines("steps.jsonl").listen(scaler):
                train()
        """
        with ExitStack() as handles:
            handles.callback(scaler.register_step_hook(self.amp_step).remove)
            handles.callback(scaler.register_scale_change_hook(self.amp_scale_change).remove)
            return handles.pop_all()


class JsonLines(Listener):
    """Append one JSON object per line to a file: ``"event"`` is ``"step"`` or ``"scale_change"``.

    Non-finite numbers become the strings ``"inf"``, ``"-inf"`` and ``"nan"``. Each line is written with
    a single call, so a crashed run keeps its lines.

    Args:
        path: the file. Use a separate file for each rank.
        only_skipped: write only skipped steps.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, only_skipped: bool = False) -> None:
        self._path = Path(path)
        self._path.open("a").close()  # fail here, not during training
        self._only_skipped = only_skipped

    @hookimpl
    def amp_step(self, scaler: GradScaler, record: StepRecord) -> None:  # noqa: ARG002
        """Write a line for the step."""
        if record.skipped or not self._only_skipped:
            self._write({"event": "step", **record.as_dict()})

    @hookimpl
    def amp_scale_change(self, scaler: GradScaler, change: ScaleChange) -> None:  # noqa: ARG002
        """Write a line for the change."""
        self._write({"event": "scale_change", **asdict(change)})

    def _write(self, event: dict[str, Any]) -> None:
        line = json.dumps({name: json_value(value) for name, value in event.items()}, allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class Logging(Listener):
    """Log skipped steps as warnings, changes of the scale as info, and other steps as debug messages.

    Args:
        logger: by default the logger ``amp_core``.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("amp_core")

    @hookimpl
    def amp_step(self, scaler: GradScaler, record: StepRecord) -> None:  # noqa: ARG002
        """Log the step."""
        if record.skipped or record.bad_micro_batches:
            self._logger.warning("%s", record, extra={"amp_record": record.as_dict()})
        else:
            self._logger.debug("%s", record)

    @hookimpl
    def amp_scale_change(self, scaler: GradScaler, change: ScaleChange) -> None:  # noqa: ARG002
        """Log the change."""
        suffix = f" {change.key!r}" if change.key is not None else ""
        self._logger.info(
            "loss scale%s: %g -> %g after step %d", suffix, change.before, change.after, change.number
        )


class _Tracker(Listener):
    """Base of the callbacks that write scalars; `TensorBoard` says which."""

    def __init__(self, tag: str) -> None:
        self._tag = tag

    @abstractmethod
    def _write(self, values: dict[str, float], step: int) -> None: ...

    @abstractmethod
    def _write_text(self, name: str, text: str, step: int) -> None: ...

    @hookimpl
    def amp_step(self, scaler: GradScaler, record: StepRecord) -> None:  # noqa: ARG002
        """Write the step."""
        tag = self._under(record.key)
        own = f"{tag}/{record.optimizer}"
        values = {f"{tag}/scale": record.scale_before, f"{own}/skipped": float(record.skipped)}
        if record.total_norm is not None:
            values[f"{own}/total_norm"] = record.total_norm
        self._write(values, record.number)
        if record.skipped:
            self._write_text(f"{own}/skips", str(record), record.number)

    @hookimpl
    def amp_scale_change(self, scaler: GradScaler, change: ScaleChange) -> None:  # noqa: ARG002
        """Write the scale of the next step."""
        self._write({f"{self._under(change.key)}/scale": change.after}, change.number + 1)

    def _under(self, key: str | None) -> str:
        return self._tag if key is None else f"{self._tag}/{key}"


class TensorBoard(_Tracker):
    """Write scale, skipped steps and norm as scalars, and the record of each skipped step as text.

    The names are ``{tag}/scale``, ``{tag}/{optimizer}/skipped`` (0 or 1), ``{tag}/{optimizer}/total_norm``
    (if the step clips) and ``{tag}/{optimizer}/skips`` (text). A scale with a key has it after the tag. The
    global step is the number of the record.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or a directory for a new one.
        tag: the prefix of all names.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, writer: SummaryWriter | str | Path, tag: str = "amp") -> None:
        super().__init__(tag)
        self.writer: SummaryWriter = (
            _imported("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(writer))
            if isinstance(writer, (str, Path))
            else writer
        )

    def _write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def _write_text(self, name: str, text: str, step: int) -> None:
        self.writer.add_text(name, text, step)

    def close(self) -> None:
        """Close the writer."""
        self.writer.close()


class WandB(_Tracker):
    """Write to a Weights & Biases run, under the names that `TensorBoard` uses.

    The values have an axis of their own, ``{tag}/step``, so they do not move the step of your ``run.log``.

    Args:
        run: what ``wandb.init()`` returned; by default the active run.
        tag: the prefix of all names.

    Raises:
        ImportError: `run` is not given and wandb is not installed.
        RuntimeError: `run` is not given and no run is active.
    """

    def __init__(self, run: Any = None, tag: str = "amp") -> None:
        super().__init__(tag)
        self.run = run or _imported("wandb", "wandb").run
        if self.run is None:
            raise RuntimeError("no wandb run is active: call wandb.init() first, or pass its result as run=.")
        self.run.define_metric(f"{tag}/step", hidden=True)
        self.run.define_metric(f"{tag}/*", step_metric=f"{tag}/step")

    def _write(self, values: dict[str, float], step: int) -> None:
        self.run.log({**values, f"{self._tag}/step": step})

    def _write_text(self, name: str, text: str, step: int) -> None:
        self.run.log({name: text, f"{self._tag}/step": step})


class MLflow(_Tracker):
    """Write metrics to an MLflow run, under the names that `TensorBoard` uses.

    The record of a skipped step becomes the artifact ``{tag}/{optimizer}/skips/{number}.txt``.

    Args:
        run_id: the id of the run; by default the active run's.
        tag: the prefix of all names.

    Raises:
        ImportError: MLflow is not installed.
        RuntimeError: `run_id` is not given and no run is active.
    """

    def __init__(self, run_id: str | None = None, tag: str = "amp") -> None:
        super().__init__(tag)
        mlflow = _imported("mlflow", "mlflow")
        active = mlflow.active_run()
        if run_id is None and active is None:
            raise RuntimeError("no MLflow run is active: call mlflow.start_run() first, or pass run_id=.")
        self.run_id = run_id or active.info.run_id
        self._client = mlflow.MlflowClient()

    def _write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self.run_id, name, value, step=step)

    def _write_text(self, name: str, text: str, step: int) -> None:
        self._client.log_text(self.run_id, text, f"{name}/{step}.txt")


def _imported(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this callback needs {extra}; install it with: pip install 'amp-core[{extra}]'"
        ) from error


class _SkipAware(Handle):
    """Makes one method of an object do nothing after a skipped step, until `remove`.

    The object gets a subclass of its class: an attribute would become part of a scheduler's ``state_dict``.
    Copies and pickles of it have the class that it had.
    """

    def __init__(self, target: Any, method: str, scaler: GradScaler, optimizer: Optimizer | None) -> None:
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


class SkipAwareScheduler(_SkipAware):
    """Make the ``step`` of a learning-rate scheduler do nothing after a skipped optimizer step.

    Without it, the schedule runs ahead of the optimizer by the number of skipped steps, and torch warns
    about ``lr_scheduler.step()`` before ``optimizer.step()`` if the first one is skipped. It waits for the
    device if the optimizer's step did not. `remove`, or leaving it as a context, undoes it.

    Args:
        scheduler: anything with ``step`` and ``optimizer``, as in ``torch.optim.lr_scheduler``.
        scaler: steps that optimizer. Until its first step, the scheduler works as usual.

    Example::

        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=1000)
        SkipAwareScheduler(scheduler, scaler)
        ...
        scheduler.step()
    """

    def __init__(self, scheduler: Any, scaler: GradScaler) -> None:
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

    Example::

        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        SkipAwareAverage(averaged, scaler)
        ...
        averaged.update_parameters(model)
    """

    def __init__(self, averaged: Any, scaler: GradScaler, optimizer: Optimizer | None = None) -> None:
        super().__init__(averaged, "update_parameters", scaler, optimizer)

    def update_parameters(self, model: Any) -> None:
        """Average the parameters of `model`, unless the last step was skipped."""
        self._call(model)
