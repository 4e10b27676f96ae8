"""The private names of ``torch.amp.GradScaler``, which libraries and subclasses use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_core.scaling.loss_scales import LossScales
from amp_core.scaling.optimizer_state import OptimizerState, as_states
from amp_core.scaling.step_log import StepLog
from amp_core.scaling.unscaler import Unscaler


def _of_own_scale(name: str, convert: Callable[[Any], Any] | None = None) -> Any:
    """Alias an attribute that torch's scaler has to that of the `LossScale` without a key."""

    def get(scaler: TorchNames) -> Any:
        return getattr(scaler._scales.own, name)

    def set_(scaler: TorchNames, value: Any) -> None:
        setattr(scaler._scales.own, name, value if convert is None else convert(value))

    return property(get, set_)


class TorchNames(torch.amp.GradScaler):
    """Base of `GradScaler` with torch's private attributes and methods, of losses without a key."""

    _scales: LossScales
    _log: StepLog
    _unscaler: Unscaler

    _scale = _of_own_scale("scale")
    _growth_tracker = _of_own_scale("growth_tracker")
    _init_scale = _of_own_scale("init_scale")
    _init_growth_tracker = _of_own_scale("init_growth_tracker")
    _per_optimizer_states = _of_own_scale("optimizer_states", as_states)
    _growth_factor = property(
        lambda self: self.get_growth_factor(), lambda self, value: self.set_growth_factor(value)
    )
    _backoff_factor = property(
        lambda self: self.get_backoff_factor(), lambda self, value: self.set_backoff_factor(value)
    )
    _growth_interval = property(
        lambda self: self.get_growth_interval(), lambda self, value: self.set_growth_interval(value)
    )

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._scales.own.allocate(dev)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        return self._scales.own.check(funcname), cast(Tensor, self._scales.own.growth_tracker)

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        # A copy: code written for torch may pass one tensor for several optimizers.
        return self._unscaler.unscale([optimizer], inv_scale, found_inf.clone(), allow_fp16=allow_fp16)

    def _get_scale_async(self) -> Tensor | None:
        return self._scales.own.scale

    def _get_growth_tracker(self) -> int:
        return self._scales.own.state().growth_tracker if self._enabled else 0

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        scale = self._scales.own.check("_check_inf_per_device")
        state = self._scales.own.optimizer_states.of(optimizer)
        self._check_by_unscaling(optimizer, scale, state)
        return cast("dict[str, Any]", state.found_inf_per_device)  # torch's annotation; keys are devices

    def _check_by_unscaling(self, optimizer: Optimizer, scale: Tensor, state: OptimizerState) -> None:
        one, found_inf = torch.ones_like(scale), torch.zeros_like(scale)
        state.found_inf_per_device = self._unscale_grads_(optimizer, one, found_inf, True)

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        return cast("dict[str, Any]", self._scales.own.optimizer_states.of(optimizer).found_inf_per_device)
