"""The gradient and cast kernels that a backend may supply.

Promises, for every method:

- all tensors of one call are on one device; they may differ in dtype, shape and memory layout;
- a sequence may be empty, a tensor may have no elements or no dimensions;
- no host synchronization: results stay on the device;
- only what is named as written is written, and the version counter of what is written moves;
- the result does not depend on how many threads call at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_core.states.loss_scale import LossScaleSchedule


@dataclass(frozen=True)
class GradStats:
    """What one read of a list of ``n`` gradients gives. All tensors are on the gradients' device.

    Attributes:
        norm: 0-dim, float32 (float64 if a gradient is): the norm over all elements of all tensors.
        norms: shape ``(n,)``, dtype of `norm`: the norm of each tensor.
        nonfinite: shape ``(n,)``, float32: 1.0 where the tensor holds an inf or a NaN, else 0.0.
        found_inf: 0-dim, float32: 1.0 if any does, else 0.0; never anything else.
    """

    norm: Tensor
    norms: Tensor
    nonfinite: Tensor
    found_inf: Tensor


@dataclass(frozen=True)
class ScaleTensors:
    """The device side of `amp_core.states.loss_scale.ScaleState`: 0-dim float32, int32 and int32 tensors."""

    scale: Tensor
    growth_tracker: Tensor
    hysteresis_left: Tensor


class Kernels(ABC):
    """The kernels of mixed precision. `Portable` is the reference; override what you do faster."""

    name: str
    """Shown by ``amp backends``, with `reason`."""

    reason: str = ""
    """Why these kernels and no faster ones, if there is something to say."""

    def layout(self, tensors: Sequence[Tensor]) -> object:  # noqa: ARG002
        """Return what `prepare` wants to know of `tensors` besides where they lie; by default nothing.

        It is kept from step to step, so it must not refer to `tensors`, and it must hold for all others of
        the same class, dtype, device, shape and strides.
        """
        return None

    def prepare(
        self,
        tensors: Sequence[Tensor],
        layout: object = None,  # noqa: ARG002
    ) -> Sequence[Tensor]:
        """Return `tensors` in a form that several calls of these kernels take faster than a list.

        The result serves as `tensors` or `grads` of every method while none of its tensors is resized
        or given other memory. By default `tensors` itself.

        Args:
            tensors: as for the other methods; only read.
            layout: what `layout` returned for such tensors; without it, it is found again.
        """
        return tensors

    @abstractmethod
    def cast(
        self,
        tensors: Sequence[Tensor],
        dtype: torch.dtype,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Return `tensors` as `dtype`, rounded to nearest even; NaN, inf and subnormals are kept.

        Args:
            tensors: floating-point tensors; only read.
            dtype: the dtype of the results; ignored where `out` is given.
            out: tensors of the same shapes to write into, which are then returned.
        """

    def add_(self, totals: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Add `grads` to `totals` in place, each sum rounded once, to the dtype of the total.

        Args:
            totals: floating-point tensors, no narrower than `grads`; written.
            grads: tensors of the same shapes; only read.
        """
        with torch.no_grad():
            for total, grad in zip(totals, grads, strict=True):
                total.add_(grad)

    @abstractmethod
    def grad_stats(self, grads: Sequence[Tensor], norm_type: float = 2.0) -> GradStats:
        """Read `grads` once; return their norms and which of them hold an inf or a NaN.

        The flag is separate from the norm: finite elements whose power overflows do not raise it,
        and the norm of finite float32 elements is right even where their squares overflow.

        Args:
            grads: dense floating-point or complex tensors; only read.
            norm_type: the order ``p`` of the norm: positive, or ``inf``.
        """

    @abstractmethod
    def multiply_(self, grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
        """Multiply `grads` in place by `factor`, in float32 or wider, one read and one write.

        Args:
            grads: dense floating-point or complex tensors; written.
            factor: one element, float32, on the same device.
            found_inf: one element, float32, on the same device; set to 1.0 if any gradient is
                non-finite before or after the product, else left as it is.
        """

    @abstractmethod
    def update_scale_(self, state: ScaleTensors, found_inf: Tensor, schedule: LossScaleSchedule) -> None:
        """Advance `state` in place as `amp_core.states.loss_scale.next_scale` says, bit for bit.

        Args:
            state: written.
            found_inf: one element, float32; above zero means that a step was skipped.
            schedule: the rule.
        """
