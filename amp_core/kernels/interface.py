"""The kernels of gradients, casts and stored weights that a backend may supply.

All tensors of one call are on one device; they may differ in dtype, shape and memory layout. A sequence may
be empty or have any length, a tensor may have no elements or no dimensions. `amp_core.plugin.contract` says
what every method promises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amp_core.common.overrides import require_same_arguments
from amp_core.common.text import counted
from amp_core.kernels import rounding
from amp_core.states.loss_scale import LossScaleSchedule

if TYPE_CHECKING:  # few programs have recipes
    from amp_core.formats import Quantization, Quantized


@dataclass(frozen=True)
class GradStats:
    """Statistics from one pass over ``n`` gradients. All tensors are on the gradients' device.

    Attributes:
        norm: 0-dim, float32 (float64 if a gradient is): the norm over all elements of all tensors.
        norms: shape ``(n,)``, dtype of `norm`: the norm of each tensor.
        nonfinite: shape ``(n,)``, float32: 1.0 if the tensor contains inf or NaN, else 0.0.
        found_inf: 0-dim, float32: exactly 1.0 if any tensor does, else exactly 0.0.
    """

    norm: Tensor
    norms: Tensor
    nonfinite: Tensor
    found_inf: Tensor


@dataclass(frozen=True)
class ScaleTensors:
    """`amp_core.states.loss_scale.ScaleState` on the device.

    Attributes:
        scale: 0-dim, float32.
        growth_tracker: 0-dim, int32: the finite steps in a row since the scale last moved.
        hysteresis_left: 0-dim, int32: the overflows that are left until the scale goes down.
    """

    scale: Tensor
    growth_tracker: Tensor
    hysteresis_left: Tensor


class Kernels(ABC):
    """The kernels of mixed precision. `Portable` is the reference; override what you can speed up."""

    name: str
    """Shown by ``amp backends``, with `reason`."""

    reason: str = ""
    """Details for ``amp backends``, such as why faster kernels are not used."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        require_same_arguments(cls, Kernels)

    def layout(self, tensors: Sequence[Tensor]) -> object:  # noqa: ARG002
        """Return what `prepare` needs to know about `tensors` except their addresses; by default nothing.

        It is reused across steps, so it must not refer to `tensors` and must be valid for all tensors of
        the same class, dtype, device, shape and strides.
        """
        return None

    def prepare(
        self,
        tensors: Sequence[Tensor],
        layout: object = None,  # noqa: ARG002
    ) -> Sequence[Tensor]:
        """Return `tensors` in a form that these kernels process faster than a list.

        The result can be passed as `tensors` or `grads` to every method until one of its tensors is resized
        or reallocated. By default, it is `tensors` itself.

        Args:
            tensors: as for the other methods; only read.
            layout: the result of `layout` for such tensors; computed again if omitted.
        """
        return tensors

    @abstractmethod
    def cast(
        self,
        tensors: Sequence[Tensor],
        dtype: torch.dtype,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Return `tensors` as `dtype`, rounded to nearest even; NaN, inf and subnormals are preserved.

        Args:
            tensors: floating-point tensors; only read.
            dtype: the dtype of the results; ignored if `out` is given.
            out: tensors of the same shapes to write into and return.
        """

    def add_(self, totals: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Add `grads` to `totals` in place, each sum rounded once, to the dtype of the total.

        Args:
            totals: floating-point tensors, no narrower than `grads`; written.
            grads: tensors of the same shapes; only read.
        """
        check_shapes(grads, totals, "totals", "grads")
        with torch.no_grad():
            for total, grad in zip(totals, grads, strict=True):
                total.add_(grad)

    @abstractmethod
    def grad_stats(self, grads: Sequence[Tensor], norm_type: float = 2.0) -> GradStats:
        """Read `grads` once; return their norms and which of them contain inf or NaN.

        The flags are independent of the norms: finite elements whose powers overflow do not set them,
        and the norm of finite float32 elements is correct even if their squares overflow.

        Args:
            grads: dense floating-point or complex tensors; only read.
            norm_type: the order ``p`` of the norm: positive, or ``inf``.
        """

    @abstractmethod
    def multiply_(self, grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
        """Multiply `grads` in place by `factor`, in float32 or wider, with one read and one write.

        Args:
            grads: dense floating-point or complex tensors; written.
            factor: one element with any number of dimensions, float32, on the same device.
            found_inf: one element with any number of dimensions, float32, on the same device; set to
                exactly 1.0 if any gradient is non-finite before or after the product, else unchanged,
                whatever it contains.
        """

    def quantize(
        self,
        tensor: Tensor,
        quantization: Quantization,
        dim: int = -1,
        *,
        seed: int | Tensor | None = None,
        amax: Tensor | None = None,
        packed: bool = False,
    ) -> Quantized:
        """Quantise `tensor`, bit for bit as `amp_core.quantize`; NaN may have other bits.

        Args:
            tensor: floating-point; float64 is rounded to float32 first; only read.
            quantization: formats, granularity and rounding.
            dim: the dimension that the matrix product contracts; it may be any.
            seed: of stochastic rounding: any int, modulo 2^64, or a 0-dim int64 tensor of 64 random bits.
            amax: what scales are found from, in place of the tensor's own largest magnitudes, where it is
                above zero.
            packed: return the bits of the formats, as `Quantized.packed`, not float32 values.

        Raises:
            TypeError, ValueError, IndexError: as `amp_core.quantize`.
        """
        from amp_core.formats import quantize

        quantized = quantize(tensor, quantization, dim, seed=seed, amax=amax)
        return quantized.packed() if packed else quantized

    @abstractmethod
    def update_scale_(self, state: ScaleTensors, found_inf: Tensor, schedule: LossScaleSchedule) -> None:
        """Advance `state` in place, bit for bit like `amp_core.states.loss_scale.next_scale`.

        Args:
            state: written. The scale is at least 0, perhaps inf; the counts are at least 0.
            found_inf: one element with any number of dimensions, float32; above zero means that a step was
                skipped. A NaN is not above zero.
            schedule: the loss-scale schedule.
        """

    def join_(self, wides: Sequence[Tensor], lows: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Write the float32 weights that `split_` split, from bfloat16 ones and what was kept of them.

        Args:
            wides: float32; written.
            lows: bfloat16 tensors of the same shapes; only read.
            kept: int16 or bfloat16 tensors of the same shapes; only read.
        """
        check_shapes(lows, wides, "wides", "lows")
        check_shapes(kept, wides, "wides", "kept")
        with torch.no_grad():
            for wide, low, rest in zip(wides, lows, kept, strict=True):
                rounding.join_(wide, low, rest)

    def split_(self, wides: Sequence[Tensor], lows: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Split float32 weights into the nearest bfloat16 ones and what these lack.

        Where `kept` is int16, it gets the lower 16 bits, so that `join_` is exact; ties are rounded away from
        zero. Where it is bfloat16, it gets the rounded difference (0 if that is not finite), or the next
        number towards 0 if the sum would be rounded to another weight, and ties are rounded to even. So what
        `join_` returns is split into the same weights, from 2^-117 on.

        Args:
            wides: float32; may be overwritten.
            lows: bfloat16 tensors of the same shapes; written.
            kept: int16 or bfloat16 tensors of the same shapes; written.
        """
        check_shapes(wides, lows, "lows", "wides")
        check_shapes(wides, kept, "kept", "wides")
        with torch.no_grad():
            for wide, low, rest in zip(wides, lows, kept, strict=True):
                rounding.split_(wide, low, rest)

    def round_(
        self,
        wides: Sequence[Tensor],
        lows: Sequence[Tensor],
        keys: Sequence[int],
        numbers: Sequence[Tensor | None],
    ) -> None:
        """Round float32 to bfloat16, up or down at random, so that the expected value is the exact one.

        The random bits are those of `amp_core.common.counter_random.random_16_bits`, bit for bit.

        Args:
            wides: float32; may be overwritten.
            lows: bfloat16 tensors of the same shapes; written.
            keys: 64 bits for each tensor, which identify its random bits.
            numbers: for each tensor the int32 numbers of its elements, from which their bits are drawn; None
                to count them from 0.
        """
        check_shapes(wides, lows, "lows", "wides")
        with torch.no_grad():
            for wide, low, key, own in zip(wides, lows, keys, numbers, strict=True):
                rounding.stochastic_(wide, low, key, own)


def check_shapes(sources: Sequence[Tensor], targets: Sequence[Tensor], written: str, read: str) -> None:
    """Raise ValueError unless both lists have the same shapes; call it before the first write."""
    if len(sources) != len(targets):
        raise ValueError(
            f"`{read}` has {counted(len(sources), 'tensor')}, but `{written}` has {len(targets)}."
        )
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source.shape != target.shape:
            raise ValueError(
                f"{written}[{i}] has shape {tuple(target.shape)}, but the tensor {read}[{i}] has "
                f"{tuple(source.shape)}. Nothing was written; pass tensors of the same shapes."
            )


def as_int32(count: int) -> int:
    """Return `count`, or the largest int32 if it is larger: the counters on the device are int32."""
    return min(count, 2**31 - 1)
