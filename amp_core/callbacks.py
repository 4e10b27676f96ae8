"""Ready-made callbacks: write the steps of a scaler to TensorBoard, W&B, MLflow, a JSONL file or a log.

Attach one to a single scaler with ``JsonLines(path).listen(scaler)``, or to all scalers with
``amp_core.plugin.register(JsonLines(path))``. While a callback is attached, each `GradScaler.update` waits
once for the device.
"""

from __future__ import annotations

import importlib
import json
import logging
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_core.common.arguments import check_scaler
from amp_core.common.extras import needing
from amp_core.common.files import as_path
from amp_core.common.text import json_value
from amp_core.plugin import hookimpl
from amp_core.scaling.grad_scaler import GradScaler
from amp_core.scaling.hooks import ScaleChange
from amp_core.scaling.skip_aware import SkipAwareAverage, SkipAwareScheduler
from amp_core.scaling.step_record import StepRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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

        Raises:
            TypeError: `scaler` is no `GradScaler`.

        Example::

            from amp_core.callbacks import JsonLines

            with JsonLines("steps.jsonl").listen(scaler):
                scaler.step(optimizer)
                scaler.update()
        """
        check_scaler(scaler, "listen")
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
        only_skipped: of the steps, write only skipped ones. Changes of the scale are always written.

    Raises:
        OSError: the file cannot be written.
        TypeError: `path` is no path.
        ValueError: it is empty.
    """

    def __init__(self, path: str | Path, only_skipped: bool = False) -> None:
        self._path = as_path(path).absolute()  # the program may go to another folder
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
    """Log bad steps as warnings, changes of the scale as info, and other steps as debug messages.

    Bad are steps that were skipped, or that left out a micro-batch.

    Args:
        logger: by default the logger ``amp_core``.

    Raises:
        TypeError: `logger` is no logger.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        if logger is not None and not hasattr(logger, "warning"):
            raise TypeError(f"logger= must be a logging.Logger, not {logger!r}.")
        self._logger = logging.getLogger("amp_core") if logger is None else logger

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
    (if the step clips) and ``{tag}/{optimizer}/skips`` (text). A scale with a key has it after the tag.
    The optimizer is called as in the record: ``Adam``, ``Adam_2``. The global step is the record's number.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or a directory for a new one.
        tag: the prefix of all names.

    Raises:
        ImportError: TensorBoard is not installed.
        TypeError: `writer` is neither a writer nor a path.
    """

    def __init__(self, writer: SummaryWriter | str | Path, tag: str = "amp") -> None:
        super().__init__(tag)
        if not (isinstance(writer, (str, Path)) or hasattr(writer, "add_scalar")):
            raise TypeError(f"writer= must be a SummaryWriter, or a directory for a new one, not {writer!r}.")
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
        TypeError: `run` is no run.
    """

    def __init__(self, run: Any = None, tag: str = "amp") -> None:
        super().__init__(tag)
        self.run = _imported("wandb", "wandb").run if run is None else run
        if self.run is None:
            raise RuntimeError("no wandb run is active: call wandb.init() first, or pass its result as run=.")
        if not hasattr(self.run, "define_metric"):
            raise TypeError(f"run= must be what wandb.init() returned, not {run!r}.")
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
        self.run_id = active.info.run_id if run_id is None else run_id
        self._client = mlflow.MlflowClient()

    def _write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self.run_id, name, value, step=step)

    def _write_text(self, name: str, text: str, step: int) -> None:
        self._client.log_text(self.run_id, text, f"{name}/{step}.txt")


def _imported(module: str, extra: str) -> Any:
    with needing(extra, f"amp-core[{extra}]"):
        return importlib.import_module(module)
