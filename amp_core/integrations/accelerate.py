"""accelerate: an `Accelerator` that uses amp-core's autocast and scaler. Tested with accelerate 1.15."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from amp_core import GradScaler, OpPolicy, autocast
from amp_core.common.extras import needing
from amp_core.integrations.checks import check_scaler, finish_update, refuse_mixed_gradients, replaced
from amp_core.scaling.grad_scaler import OptState

with needing("accelerate", "amp-core[accelerate]"):
    import accelerate.accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import AutocastKwargs, DistributedType

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` with mixed precision by amp-core, on the CPU and with float16 there too.

    Its settings are accelerate's: ``mixed_precision=`` or ``ACCELERATE_MIXED_PRECISION``, and in
    ``kwargs_handlers`` an ``AutocastKwargs`` or a ``GradScalerKwargs``. Settings that amp-core does not
    support raise an error. ``optimizer.step_was_skipped`` is also correct for fused optimizers, so their
    schedulers wait as well. Step records name the parameters of prepared models.

    Args:
        scaler: a `GradScaler`; by default, one from the ``GradScalerKwargs`` for ``"fp16"``.
        policy: the `OpPolicy` of forward passes; by default the device's.
        args: as for ``accelerate.Accelerator``.
        kwargs: as for ``accelerate.Accelerator``.

    Raises:
        ValueError: the settings contradict each other, or leave mixed precision to another library (fp8,
            DeepSpeed, Megatron-LM, FSDP 1 with float16).
        TypeError: `scaler` is not amp-core's.
    """

    def __init__(
        self, *args: Any, scaler: GradScaler | None = None, policy: OpPolicy | None = None, **kwargs: Any
    ) -> None:
        check_scaler(scaler)
        super().__init__(*args, **kwargs)
        for refusal in self._refusals(scaler, policy):
            raise ValueError(refusal)
        self.native_amp = self.mixed_precision in _DTYPES
        self._policy = policy
        if self.mixed_precision == "fp16" and scaler is None:
            settings = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            scaler = GradScaler(self.device.type, **settings)
        self.scaler = scaler

    def _refusals(self, scaler: GradScaler | None, policy: OpPolicy | None) -> Iterator[str]:
        precision, distributed = self.mixed_precision, self.distributed_type
        if distributed in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            yield f"{distributed.value} handles mixed precision itself: use accelerate.Accelerator with it."
        if precision not in {"no", *_DTYPES}:
            yield f"amp-core does not support mixed_precision={precision!r}: use accelerate.Accelerator."
        if precision == "fp16" and distributed == DistributedType.FSDP and not self.is_fsdp2:
            yield "amp-core's GradScaler needs FSDP 2 for float16: set fsdp_version=2 in the FSDP plugin."
        if scaler is not None and precision != "fp16":
            yield f"scaler= needs mixed_precision='fp16', and mixed_precision is {precision!r}."
        if scaler is not None and self.scaler_handler is not None:
            yield "scaler= and GradScalerKwargs both configure the scaler: pass only one of them."
        if policy is not None and precision == "no":
            yield "policy= needs mixed precision, and mixed_precision is 'no'."

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Run a block or a function in an amp-core region; `autocast_handler` overrides the accelerator's."""
        with self._region(self.native_amp, autocast_handler or self.autocast_handler):
            yield

    def _region(self, native_amp: bool, handler: AutocastKwargs | None) -> AbstractContextManager[Any]:
        if not native_amp:
            return nullcontext()
        settings = {} if handler is None else handler.to_kwargs()
        dtype = _DTYPES[self.mixed_precision]
        return autocast(self.device.type, dtype=dtype, policy=self._policy, **settings)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Prepare the model so that its forward pass runs in an amp-core region."""
        with replaced(accelerate.accelerator, "get_mixed_precision_context_manager", self._region):
            prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
        if self.scaler is not None:
            self.scaler.name_parameters(self.unwrap_model(prepared).named_parameters())
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare the optimizer so that its ``step_was_skipped`` queries the scaler."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        prepared.__class__ = _Optimizer
        prepared._prepared = self._optimizers
        return prepared

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Scale the loss, by the scale after all steps so far."""
        finish_update(self.scaler)
        super().backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of `optimizer`; by default all that are not unscaled yet, before clipping."""
        if optimizer is None and self.scaler is not None:
            states = self.scaler._per_optimizer_states
            for each in self._optimizers:
                refuse_mixed_gradients(self.scaler, each.optimizer)
            optimizer = [o for o in self._optimizers if states.of(o.optimizer).stage is OptState.READY]
        super().unscale_gradients(optimizer)

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        """Save the state after all steps so far."""
        finish_update(self.scaler)
        return super().save_state(*args, **kwargs)

    def end_training(self) -> None:
        """Leave the scaler as it is after all steps."""
        finish_update(self.scaler)
        super().end_training()


class _Optimizer(AcceleratedOptimizer):
    _prepared: list[AcceleratedOptimizer]  # all of the accelerator

    def step(self, closure: Any = None) -> None:
        """Step; the others may have gradients of the same scale, so it moves in the next backward pass."""
        alone = self.scaler is None or len(self._prepared) == 1
        if not alone and self.scaler._per_optimizer_states.of(self.optimizer).stage is OptState.STEPPED:
            self.scaler.update()
        with nullcontext() if alone else replaced(self.scaler, "update", lambda: None):
            super().step(closure)

    @property
    def step_was_skipped(self) -> bool:
        if self.scaler is None or not self.scaler.is_enabled():
            return False
        record = self.scaler.last_step.get(self.optimizer)
        return record is not None and record.skipped
