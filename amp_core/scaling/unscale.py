"""Unscaling and clipping gradients in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_core.scaling.arithmetic import reciprocal, unscale_and_clip, zero
from amp_core.scaling.distributed import agree_on_flag, ranks_of
from amp_core.scaling.gradients import Gradients, Look, by_device, gather, look, parameters_of
from amp_core.scaling.keyed import KeyedScales
from amp_core.scaling.replicate import _MultiDeviceReplicator
from amp_core.states.loss_scale import OptState, next_stage

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from amp_core.scaling.overlap import Overlap


class Unscaling(KeyedScales):
    """The part of `GradScaler` that writes gradients."""

    _allow_fp16: bool
    _overlap: Overlap | None
    _process_group: ProcessGroup | None

    def unscale_(self, optimizer: torch.optim.Optimizer, key: str | None = None) -> None:
        """Divide the gradients of `optimizer` by the scale, in place, and note whether all are finite.

        Does not wait for the device. Needed only to look at or change gradients before `step`.

        Raises:
            RuntimeError: it was called before since the last `update`, or after `step`; torch's texts.
            AssertionError: nothing was scaled yet; torch's text.
            ValueError: a gradient is float16 and ``allow_fp16_gradients`` is not set.
        """
        if not self._enabled:
            return
        owner = self._scaler_of(optimizer, key, "unscale_")
        if owner is not self:
            owner.unscale_(optimizer)
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states.of(optimizer)
        stage = next_stage(state["stage"], "unscale_")
        state["found_inf_per_device"] = self._unscale_grads_(
            optimizer, reciprocal(scale), zero(scale.device), self._allow_fp16
        )
        state["stage"] = stage

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        factors, flags = _MultiDeviceReplicator(inv_scale), _MultiDeviceReplicator(found_inf)
        with torch.no_grad():
            parts = gather(optimizer, allow_fp16=allow_fp16)
            for part in parts:
                part.multiply_(factors.get(part.device), flags.get(part.device))
        found = flags._per_device_tensors
        ranks = ranks_of(parts, self._process_group)
        if ranks is None:
            return found
        device = found_inf.device
        return {device: agree_on_flag(list(found.values()), ranks, device)}

    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        key: str | None = None,
    ) -> Tensor:
        """Unscale and clip the gradients of `optimizer` in one read and one read-write.

        Does not wait for the device, unless `error_if_nonfinite`.

        Args:
            optimizer: its gradients are left unscaled and clipped, as by `unscale_` and
                ``torch.nn.utils.clip_grad_norm_``.
            max_norm: the greatest norm of all gradients together.
            norm_type: the order of the norm.
            error_if_nonfinite: raise where the norm is not finite.
            key: of the loss that made the gradients, if it was scaled under one.

        Returns:
            0-dim tensor: the norm of the true gradients, before clipping.

        Raises:
            RuntimeError: after `step`; or `error_if_nonfinite` and the norm is not finite.
        """
        if not self._enabled:
            return torch.nn.utils.clip_grad_norm_(
                parameters_of(optimizer), max_norm, norm_type, error_if_nonfinite
            )
        owner = self._scaler_of(optimizer, key, "clip_grad_norm_")
        if owner is not self:
            return owner.clip_grad_norm_(optimizer, max_norm, norm_type, error_if_nonfinite)
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        state = self._per_optimizer_states.of(optimizer)
        unscaled = state["stage"] is OptState.UNSCALED
        stage = state["stage"] if unscaled else next_stage(state["stage"], "unscale_")
        divisor = torch.ones_like(scale) if unscaled else scale
        parts = gather(optimizer, allow_fp16=self._allow_fp16)
        seen = look(parts, norm_type, scale.device, self._process_group, self._overlap)
        state["looked"] = parts, seen.measured
        norm, factor = unscale_and_clip(seen.norm, divisor, max_norm)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
                f"cannot be clipped. To disable this error and scale the gradients by the non-finite norm "
                f"anyway, set `error_if_nonfinite=False`"
            )
        self._multiply(parts, factor, seen, state)
        state["stage"], state["norm"] = stage, norm
        return norm

    def _multiply(self, parts: list[Gradients], factor: Tensor, seen: Look, state: dict[str, Any]) -> None:
        factors = _MultiDeviceReplicator(factor)
        flags, left = list(state["found_inf_per_device"].items()), dict(seen.flags)
        if seen.agreed:
            # What this rank alone would find in its products, the others would not know of.
            beyond = _leave_range(parts, seen.norm * factor)
            left = {device: torch.maximum(flag, beyond) for device, flag in left.items()}
        with torch.no_grad():
            for part in parts:
                before = None if seen.agreed else left.pop(part.device, None)
                flag = zero(part.device) if before is None else before
                part.multiply_(factors.get(part.device), None if seen.agreed else flag)
                flags.append((part.device, flag))
        state["found_inf_per_device"] = by_device([*flags, *left.items()])


def _leave_range(parts: list[Gradients], norm: Tensor) -> Tensor:
    """Return 1.0 where gradients of this norm can have elements that one of their dtypes cannot hold."""
    dtypes = {gradient.dtype for part in parts for gradient in part.grads}
    largest = min((torch.finfo(dtype).max for dtype in dtypes), default=torch.inf)
    return (norm <= largest).logical_not().float()
