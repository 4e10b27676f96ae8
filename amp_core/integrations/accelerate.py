"""accelerate: an `Accelerator` whose autocast and scaler are amp-core's. Tried with accelerate 1.15."""

from __future__ import annotations

import functools
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from amp_core import GradScaler, OpPolicy, autocast, get_backend


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` with mixed precision by amp-core, on the CPU and with float16 there too.

    ``optimizer.step_was_skipped`` is right with fused optimizers (accelerate#4242), so that schedulers are
    held back with them too. Gradient accumulation, clipping and checkpoints are accelerate's.

    Args:
        amp_dtype: the dtype of low-precision ops; by default the device's.
        scaler: a `GradScaler`; by default one for float16 and none for other dtypes.
        policy: the `OpPolicy` of forwards; by default the device's.
        kwargs: for ``accelerate.Accelerator``; `mixed_precision` is not among them.

    Raises:
        TypeError: `mixed_precision` was given as well.
    """

    def __init__(
        self,
        *,
        amp_dtype: torch.dtype | None = None,
        scaler: GradScaler | None = None,
        policy: OpPolicy | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("mixed_precision", None) not in (None, "no"):
            raise TypeError("mixed_precision= is accelerate's own; say amp_dtype= for amp-core's.")
        super().__init__(mixed_precision="no", **kwargs)
        self._amp_dtype = amp_dtype or get_backend(self.device.type).default_dtype()
        self._amp_policy = policy
        if scaler is None and self._amp_dtype is torch.float16:
            scaler = GradScaler(self.device.type)
        self.scaler = scaler

    def autocast(self, autocast_handler: Any = None) -> autocast:  # noqa: ARG002  # accelerate's signature
        """Return a region of amp-core."""
        return autocast(self.device.type, dtype=self._amp_dtype, policy=self._amp_policy)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Prepare the model, its forward in a region of amp-core."""
        model.forward = self._inside(model.forward)
        prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
        return prepared

    def _inside(self, forward: Any) -> Any:
        @functools.wraps(forward)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            with self.autocast():
                outputs = forward(*args, **kwargs)
            return accelerate.utils.convert_to_fp32(outputs)

        return in_region

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare the optimizer; its ``step_was_skipped`` asks the scaler."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        prepared.__class__ = _Optimizer
        return prepared

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of `optimizer`, by default of all, so that they can be clipped."""
        if self.scaler is None:
            return
        given = self._optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, (list, tuple)) else [given]:
            self.scaler.unscale_(one.optimizer if isinstance(one, AcceleratedOptimizer) else one)


class _Optimizer(AcceleratedOptimizer):
    @property
    def step_was_skipped(self) -> bool:
        record = self.scaler.last_step.get(self.optimizer) if self.scaler is not None else None
        return record is not None and record.skipped
