"""Lightning: `MixedPrecision` for the Trainer, `FabricMixedPrecision` for Fabric. Tested with 2.6."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from amp_core import GradScaler, OpPolicy, autocast
from amp_core.callbacks import SkipAwareScheduler
from amp_core.common.extras import needing
from amp_core.common.optimizers import parameters_of
from amp_core.integrations.checks import check_scaler, finish_update, refuse_mixed_gradients, replaced
from amp_core.scaling.grad_scaler import OptState

with needing("lightning", "amp-core[lightning]"):
    from lightning.fabric.plugins.precision import MixedPrecision as TheirFabricPrecision
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins.precision import MixedPrecision as TheirPrecision
    from lightning.pytorch.utilities import GradClipAlgorithmType
    from lightning.pytorch.utilities.model_helpers import is_overridden

_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class _Ours:
    """What both plugins have in common."""

    scaler: Any

    def __init__(
        self,
        precision: str,
        device: str,
        scaler: GradScaler | None = None,
        policy: OpPolicy | None = None,
    ) -> None:
        check_scaler(scaler)
        if scaler is None and precision == "16-mixed":
            scaler = GradScaler(device)
        super().__init__(precision, device, scaler)  # type: ignore[call-arg]
        self._policy = policy
        self._modules: WeakSet[nn.Module] = WeakSet()  # that Fabric has set up

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_modules": list(self._modules)}  # pickle refuses the set

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _modules=WeakSet(state["_modules"]))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler after all steps so far."""
        finish_update(self.scaler)
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return state


class MixedPrecision(_Ours, TheirPrecision):
    """Lightning's precision plugin on amp-core: ``Trainer(plugins=[MixedPrecision("16-mixed", "cpu")])``.

    Unlike Lightning's, it also clips gradients of fused optimizers; clipping by norm shares the unscaling
    passes. Step records name the parameters of the module.

    Args:
        precision: ``"16-mixed"`` (with a scaler) or ``"bf16-mixed"``.
        device: a device type with an amp-core backend.
        scaler: by default a new `GradScaler` for ``"16-mixed"``; ``"bf16-mixed"`` takes none.
        policy: the `OpPolicy` of the forward pass; by default the device's.

    Raises:
        ValueError: the precision is not one of these; Lightning's text.
        MisconfigurationException: a scaler for ``"bf16-mixed"``; Lightning's text.
        TypeError: `scaler` is not amp-core's.
    """

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Let step records name the parameters of `model`."""
        if self.scaler is not None:
            self.scaler.name_parameters(model.named_parameters())
        return model, optimizers, lr_schedulers

    def optimizer_step(
        self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, clip, and step or skip; ``scaler.last_step`` says which.

        Raises:
            MisconfigurationException: the optimizer is LBFGS; Lightning's text.
        """
        if self.scaler is None or isinstance(optimizer, LBFGS):
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:
            with replaced(self, "clip_gradients", lambda *_, **__: None):  # no step will use them
                self._after_closure(model, optimizer)
            return result
        if _reads_gradients(model):
            self._unscale(optimizer)
        self._after_closure(model, optimizer)
        result = self.scaler.step(optimizer, **kwargs)
        if len(model.trainer.optimizers) == 1:  # else others may step with gradients of the same scale
            self.scaler.update()
        return result

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Scale the loss, by the scale after all steps so far."""
        finish_update(self.scaler)
        scaled: Tensor = super().pre_backward(tensor, module)
        return scaled

    def teardown(self) -> None:
        """Leave the scaler as it is after all steps."""
        finish_update(self.scaler)
        super().teardown()

    def _unscale(self, optimizer: Optimizer) -> None:
        if self.scaler._per_optimizer_states.of(optimizer).stage is OptState.READY:
            self.scaler.unscale_(optimizer)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the gradients of any optimizer, unscaled."""
        if isinstance(optimizer, LightningOptimizer):  # from `self.optimizers()`
            optimizer = optimizer.optimizer
        if self.scaler is not None and clip_val > 0:
            if gradient_clip_algorithm == GradClipAlgorithmType.NORM:
                self.scaler.clip_grad_norm_(optimizer, clip_val)
                return
            refuse_mixed_gradients(self.scaler, optimizer)
            self._unscale(optimizer)
        super(TheirPrecision, self).clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def autocast_context_manager(self) -> autocast:
        """Return the amp-core region for forward passes."""
        return autocast(self.device, dtype=_DTYPES[self.precision], cache_enabled=False, policy=self._policy)


def _reads_gradients(model: Any) -> bool:
    """Return whether a user hook reads gradients between the backward pass and the step."""
    if is_overridden("configure_gradient_clipping", model):
        return True
    return any(is_overridden("on_before_optimizer_step", one) for one in (model, *model.trainer.callbacks))


class HoldSchedulers(Callback):
    """Do not step a learning-rate scheduler when the optimizer step before it was skipped.

    This holds for schedulers that step after each optimizer step. Those of epochs, or of every n-th step,
    stand for several steps, and are left alone.
    """

    def __init__(self) -> None:
        self._held: list[SkipAwareScheduler] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Make the schedulers depend on the last step."""
        scaler = trainer.precision_plugin.scaler
        if isinstance(scaler, GradScaler):
            each_step = [c for c in trainer.lr_scheduler_configs if (c.interval, c.frequency) == ("step", 1)]
            self._held = [SkipAwareScheduler(config.scheduler, scaler) for config in each_step]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Restore the schedulers."""
        for held in self._held:
            held.remove()
        self._held = []

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Restore the schedulers."""
        self.on_train_end(trainer, pl_module)


class FabricMixedPrecision(_Ours, TheirFabricPrecision):
    """Fabric's precision plugin on amp-core: ``Fabric(plugins=[FabricMixedPrecision("16-mixed", "cpu")])``.

    Args:
        precision: as for `MixedPrecision`.
        device: as for `MixedPrecision`.
        scaler: as for `MixedPrecision`.
        policy: as for `MixedPrecision`.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Let step records name the parameters of `module`."""
        self._modules.add(module)
        if self.scaler is not None:
            self.scaler.name_parameters(module.named_parameters())
        converted: nn.Module = super().convert_module(module)
        return converted

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the amp-core region for forward passes."""
        return autocast(self.device, dtype=_DTYPES[self.precision], policy=self._policy)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Scale the loss, by the scale after all steps so far."""
        finish_update(self.scaler)
        super().backward(tensor, model, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step or skip; the scale moves once no other optimizer can have gradients of the same scale."""
        own = set(map(id, parameters_of(optimizer)))
        rest = (p for module in self._modules for p in module.parameters() if id(p) not in own)
        wait = self.scaler is not None and any(p.grad is not None for p in rest)
        with replaced(self.scaler, "update", lambda: None) if wait else nullcontext():
            return super().optimizer_step(optimizer, **kwargs)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscale the gradients for ``fabric.clip_gradients``, including those of fused optimizers."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
