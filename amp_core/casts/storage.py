"""The storages of bfloat16 weights: how a float32 weight is rounded, and what is kept beside it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_core._torch.tensors import part_of
from amp_core.casts.shards import elements, like
from amp_core.common.containers import map_tensors
from amp_core.common.counter_random import key_of
from amp_core.kernels import Kernels
from amp_core.plugin import get_backend


class Draw(NamedTuple):
    """Identifies the random bits of one parameter in one step."""

    seed: int
    step: int
    number: int

    def key(self, purpose: int = 0) -> int:
        """Return the key of these random bits."""
        return key_of(self.seed, self.step, self.number, purpose)


class Storage(NamedTuple):
    """How a float32 weight is stored.

    Attributes:
        kept: the dtype of what is kept beside a bfloat16 weight; None if the weight is rounded stochastically
            and nothing is kept.
    """

    kept: torch.dtype | None

    def widen_(self, wide: Tensor, low: Tensor, kept: Tensor | None) -> None:
        """Write the float32 weight to `wide`."""
        if kept is None:
            wide.copy_(low)
        else:
            _kernels(low).join_([wide], [low], [kept])

    def narrow(
        self, wide: Tensor, param: Tensor, draw: Draw | None = None, kept: Tensor | None = None
    ) -> Tensor | None:
        """Store `wide`, which is overwritten, in the bfloat16 `param`; return what is kept.

        Args:
            wide: the float32 weight, the part on this rank.
            param: written.
            draw: the random bits; None to round to nearest where the storage would draw some.
            kept: the memory for what is kept; by default, or if it is of another storage, new memory.
        """
        low = part_of(param).detach()
        if self.kept is not None:
            if kept is None or kept.dtype is not self.kept:
                with torch.inference_mode(mode=False):  # later steps may be outside of it
                    kept = torch.empty_like(wide, dtype=self.kept)
            _kernels(wide).split_([wide], [low], [kept])
            return kept
        if draw is None:
            low.copy_(wide)
        else:
            _kernels(wide).round_([wide], [low], [draw.key()], [elements(param)])
        return None


STORAGES = {"remainder": Storage(torch.int16), "stochastic": Storage(None), "kahan": Storage(torch.bfloat16)}
KEPT = "amp_core_kept"
"""The entry of the optimizer's state, per parameter, that holds what its weight lacks."""
KEPT_DTYPES = (torch.int16, torch.bfloat16)


def _kernels(tensor: Tensor) -> Kernels:
    return get_backend(tensor.device.type).kernels()


def packed(kept: Tensor, *, widened: bool = False) -> Tensor:
    """Return `kept` as checkpoints have it: remainders as pairs of bytes, in the same memory.

    Ranks exchange states for full checkpoints, and neither gloo nor NCCL takes int16. FSDP1 takes states of
    the parameter's shape alone, and perhaps of one dtype: it gets them `widened`, to float32, which is exact.
    """
    if widened:
        return kept.float()
    return like(kept, part_of(kept).unsqueeze(-1).view(torch.uint8)) if kept.dtype is torch.int16 else kept


def unpacked(kept: Tensor, param: Tensor, how: Storage) -> Tensor:
    """Return what a checkpoint has of `param` as the storage keeps it, or the other one that saved it."""
    if kept.dim() > param.dim():  # bytes, which torch may have loaded in the dtype of the parameter
        return like(param, part_of(kept).to(torch.uint8).view(torch.int16).squeeze(-1))
    return kept if kept.dtype in KEPT_DTYPES else kept.to(how.kept or torch.bfloat16)


def drop_foreign(kept: Tensor, low: Tensor) -> Tensor:
    """Return `kept` with 0 where it cannot belong to `low`, which someone has overwritten.

    A compensation is at most half a unit in the last place of its weight, and less than that beside an odd
    weight, so that it does not change it. Below a power of 2, units are half as large. A remainder beside 0
    or inf would make another number of it, or NaN: about 1e-41 of a weight that was pruned.
    """
    if kept.dtype is torch.int16:
        return kept.masked_fill((low == 0) | low.isinf(), 0)
    bits = low.view(torch.int16)
    power = (bits & 0x7F80).view(torch.bfloat16)  # the exponent alone
    is_below = (low.abs() == power) & ((kept < 0) != (low < 0))
    half = torch.where(is_below, 2**-9, 2**-8) * power
    is_tie = (kept.abs() == half) & (bits & 1 == 1) & (half >= torch.finfo(torch.bfloat16).tiny)
    return kept.masked_fill((kept.abs() > half) | is_tie, 0)


def widen_state(value: Any) -> Any:
    """Return one value of the optimizer's state as a float32 step needs it."""
    return map_tensors(value, lambda t: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t)


def narrow_state(value: Any, param: Tensor, key: int) -> Any:
    """Round one state to bfloat16; stochastically, as the second moment would never change otherwise."""
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    if not is_float or value.shape != param.shape or value.dim() == 0:  # a count, or a factor, which is small
        return value
    wide = part_of(value)
    low = torch.empty_like(wide, dtype=torch.bfloat16)
    _kernels(wide).round_([wide], [low], [key], [elements(param)])
    return like(param, low)
