"""Low-precision leaves of float32 weights: what ops use under `master_weights`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_core._torch import internals as _torch
from amp_core.casts.bulk import allocate, buckets, cast_weights
from amp_core.casts.memory import KeptMemory
from amp_core.kernels import Kernels

_DIFFERENTIATED = (
    "The gradient of a weight under master_weights was to be differentiated again (create_graph=True), but "
    "it is added to the weight's .grad outside autograd. Use cached_casts(model) for this model."
)
_HOOKED = (
    "A hook was put on a weight of shape {shape} between a forward pass under master_weights and its "
    "backward pass, so it would not be called. Put it there before the forward pass; the weight's gradient "
    "then goes through autograd."
)


class Leaves:
    """Keeps for each weight and dtype a leaf tensor: the cast, rewritten in place when the weight changes.

    A backward pass ends at the leaf, and its gradient is at once added to the float32 ``.grad`` of the
    weight. A weight gets an autograd cast instead where something waits for its own gradient in the
    graph: hooks that were put on it, or DistributedDataParallel. So does one that needs no gradient.

    Args:
        reduced: DistributedDataParallel is known to wait for the gradients.
    """

    def __init__(self, reduced: bool = False) -> None:
        self._kept: dict[tuple[int, torch.dtype], Tensor] = {}
        self._reduced = reduced

    def cast(
        self, weights: Sequence[Tensor], dtype: torch.dtype, kernels: Kernels, memory: KeptMemory
    ) -> list[Tensor]:
        """Return the leaves of `weights`, up to date; see `amp_core.casts.cache.MakeCasts`."""
        self._reduced = self._reduced or _torch.inside_ddp()
        if self._reduced or not weights[0].requires_grad:
            return cast_weights(weights, dtype, kernels, memory)
        plain = [w for w in weights if not _torch.has_gradient_hooks(w)]
        hooked = [w for w in weights if _torch.has_gradient_hooks(w)]
        casts = cast_weights(hooked, dtype, kernels, memory)
        made = dict(zip(map(id, hooked), casts, strict=True))
        with torch.inference_mode(mode=False), torch.no_grad():
            for bucket in buckets([w for w in plain if not self._fits(w, dtype)]):
                self._add(bucket, dtype, kernels, memory)
            leaves = [self._kept[id(w), dtype] for w in plain]
            kernels.cast(plain, dtype, out=leaves)
        made.update(zip(map(id, plain), leaves, strict=True))
        return [made[id(w)] for w in weights]

    def _fits(self, weight: Tensor, dtype: torch.dtype) -> bool:
        leaf = self._kept.get((id(weight), dtype))
        return leaf is not None and (leaf.shape, leaf.stride(), leaf.device) == (
            weight.shape,
            weight.stride(),
            weight.device,
        )

    def _add(
        self, weights: Sequence[Tensor], dtype: torch.dtype, kernels: Kernels, memory: KeptMemory
    ) -> None:
        for weight, leaf in zip(weights, allocate(weights, dtype, memory), strict=True):
            leaf.requires_grad_()
            leaf.register_post_accumulate_grad_hook(_MainGradient(weight, kernels, memory))  # type: ignore[no-untyped-call]
            self._kept[id(weight), dtype] = leaf

    def keep_only(self, keys: set[int]) -> None:
        """Free the leaves of all weights but those whose ``id`` is in `keys`."""
        self._kept = {key: leaf for key, leaf in self._kept.items() if key[0] in keys}

    def all(self) -> list[Tensor]:
        """Return every leaf that is kept."""
        return list(self._kept.values())


_SMALL = 2**16
"""Elements up to which torch's operations are faster than the way to a kernel."""


class _MainGradient:
    """Hands what arrives at a leaf over to the ``.grad`` of its weight."""

    def __init__(self, weight: Tensor, kernels: Kernels, memory: KeptMemory) -> None:
        self._weight = weight
        self._kernels = kernels
        self._memory = memory

    def __call__(self, leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        assert grad is not None  # the hook runs after it was accumulated
        if grad.requires_grad:
            raise RuntimeError(_DIFFERENTIATED)
        if _torch.has_gradient_hooks(self._weight):
            raise RuntimeError(_HOOKED.format(shape=tuple(self._weight.shape)))
        total = self._weight.grad
        with torch.no_grad():
            if total is None:
                self._weight.grad = self._first(grad)
            elif grad.numel() <= _SMALL:
                total.add_(grad)
            else:
                self._kernels.add_([total], [grad])

    def _first(self, grad: Tensor) -> Tensor:
        wide = self._memory.empty_like(grad, self._weight.dtype)
        if grad.numel() <= _SMALL:
            return wide.copy_(grad)
        self._kernels.cast([grad], wide.dtype, out=[wide])
        return wide
