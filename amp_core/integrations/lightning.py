"""Lightning 2.6: `MixedPrecision` for the Trainer, `FabricMixedPrecision` for Fabric."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.fabric.plugins.precision import MixedPrecision as TheirFabricPrecision
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision as TheirPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer

from amp_core import GradScaler, OpPolicy, autocast

_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class MixedPrecision(TheirPrecision):
    """Lightning's precision plugin over amp-core: ``Trainer(plugins=[MixedPrecision("16-mixed", "cpu")])``.

    Unlike Lightning's, it clips gradients of fused optimizers too, by norm in the passes that unscale them.

    Args:
        precision: ``"16-mixed"`` (with a scaler) or ``"bf16-mixed"``.
        device: a device type with a backend of amp-core.
        scaler: by default a new `GradScaler` for ``"16-mixed"``, none for ``"bf16-mixed"``.
        policy: the `OpPolicy` of the forward; by default the device's.

    Raises:
        ValueError: another precision; Lightning's text.
    """

    def __init__(
        self,
        precision: str,
        device: str,
        scaler: GradScaler | None = None,
        policy: OpPolicy | None = None,
    ) -> None:
        if scaler is None and precision == "16-mixed":
            scaler = GradScaler(device)
        super().__init__(precision, device, scaler)
        self._policy = policy

    def optimizer_step(
        self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, clip, and step or skip; what skips it is in ``scaler.last_step``."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        self._after_closure(model, optimizer)
        if result is None and model.automatic_optimization:  # the training step was left out
            return result
        result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return result

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Unscale and clip, whatever the optimizer."""
        if self.scaler is None or clip_val <= 0:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
        elif gradient_clip_algorithm == GradClipAlgorithmType.NORM:
            self.scaler.clip_grad_norm_(optimizer, clip_val)
        else:
            self.scaler.unscale_(optimizer)
            self.clip_grad_by_value(optimizer, clip_val)

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Run the forward in a region of amp-core."""
        with autocast(self.device, dtype=_DTYPES[self.precision], policy=self._policy):
            yield


class HoldSchedulers(Callback):
    """Holds learning-rate schedulers back where their optimizer's step was skipped (Lightning#18828)."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Put a condition on the module's ``lr_scheduler_step``."""
        scaler, step = trainer.precision_plugin.scaler, pl_module.lr_scheduler_step
        if not isinstance(scaler, GradScaler):
            return

        def step_unless_skipped(scheduler: Any, metric: Any) -> None:
            record = scaler.last_step.get(scheduler.optimizer)
            if record is None or not record.skipped:
                step(scheduler, metric)

        pl_module.lr_scheduler_step = step_unless_skipped

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Take it off again."""
        pl_module.__dict__.pop("lr_scheduler_step", None)


class FabricMixedPrecision(TheirFabricPrecision):
    """Fabric's precision plugin over amp-core: ``Fabric(plugins=[FabricMixedPrecision("16-mixed", "cpu")])``.

    Args:
        precision: as for `MixedPrecision`.
        device: as for `MixedPrecision`.
        scaler: as for `MixedPrecision`.
        policy: as for `MixedPrecision`.
    """

    def __init__(
        self,
        precision: str,
        device: str,
        scaler: GradScaler | None = None,
        policy: OpPolicy | None = None,
    ) -> None:
        if scaler is None and precision == "16-mixed":
            scaler = GradScaler(device)
        super().__init__(precision, device, scaler)
        self._policy = policy

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the region of amp-core in which forwards run."""
        return autocast(self.device, dtype=_DTYPES[self.precision], policy=self._policy)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscale, so that ``fabric.clip_gradients`` can clip; gradients of fused optimizers too."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
