"""Weight casts that accumulate gradients into the weight's float32 ``.grad``, for `master_weights`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor

from amp_core._torch.autograd import gradient_is_accumulated, has_gradient_hooks, inside_ddp, is_compiled
from amp_core._torch.tensors import WeakStorage, identity_of, weak_memory
from amp_core.casts.bulk import allocate, buckets, cast_weights, is_small_on_host, run_backward_early
from amp_core.casts.cache import WeightCache
from amp_core.casts.memory import KeptMemory
from amp_core.common.locks import new_lock
from amp_core.dispatch.fingerprints import Fingerprint, fingerprint
from amp_core.kernels import Kernels

_BY_AUTOGRAD = 2**18
"""Up to this many bytes, a CPU is faster if autograd accumulates the gradient of a weight."""


class AccumulatingCasts:
    """Keeps one cast per large weight and dtype, and rewrites it in place when the weight changes.

    A backward pass adds the gradient of a cast directly to the float32 ``.grad`` of its weight, in one pass
    over memory. If something needs the gradient in the graph (hooks on the weight, ``autograd.grad``,
    ``create_graph=True``, DistributedDataParallel), autograd propagates it as usual.

    Args:
        reduced: whether DistributedDataParallel is known to reduce the gradients.
    """

    _cache: weakref.ref[WeightCache]  # which has a reference to this

    def __init__(self, reduced: bool) -> None:
        self._kept: dict[tuple[int, torch.dtype], Tensor] = {}
        self._written: dict[tuple[int, torch.dtype], Fingerprint] = {}
        self._reduced = reduced
        self._lock = new_lock()  # signal handlers may use the model, too

    def serve(self, cache: WeightCache) -> None:
        """Take over the weights of `cache`, which calls `cast`; casts of others are freed."""
        self._cache = weakref.ref(cache)

    def cast(
        self, weights: Sequence[Tensor], dtype: torch.dtype, kernels: Kernels, memory: KeptMemory
    ) -> list[Tensor]:
        """Return up-to-date casts of `weights`; see `amp_core.casts.cache.MakeCasts`."""
        self._reduced = self._reduced or inside_ddp()
        if self._reduced or not weights[0].requires_grad:
            return cast_weights(weights, dtype, kernels, memory)
        with self._lock, torch.inference_mode(mode=False):
            new = [w for w in weights if not self._fits(w, dtype)]
            if new:
                self.keep_only(self._known().keys())
            for bucket in buckets(new):
                self._add(bucket, dtype, kernels, memory)
            self._write(
                [w for w in weights if self._written.get((id(w), dtype)) != self._value(w)], dtype, kernels
            )
            return [self._kept[id(w), dtype] for w in weights]

    def _write(self, weights: Sequence[Tensor], dtype: torch.dtype, kernels: Kernels) -> None:
        """Rewrite the casts of `weights`. A graph may need the others: autograd sees each write to them."""
        written = {(id(w), dtype): self._value(w) for w in weights}
        with torch.no_grad():
            kernels.cast(weights, dtype, out=[self._kept[id(w), dtype] for w in weights])
        self._written.update(written)  # last: a signal handler may use the model on the line before

    def _value(self, weight: Tensor) -> Fingerprint:
        """Return what changes whenever the value of `weight` may have."""
        *value, _requires_grad, _hooks = fingerprint(weight)
        return self._known().invalidations, *value

    def _known(self) -> WeightCache:
        cache = self._cache()
        assert cache is not None, "it has called this"
        return cache

    def is_small(self, weight: Tensor) -> bool:
        """Return whether it is faster to let torch cast `weight`, and autograd accumulate its gradient."""
        if self._reduced:
            return is_small_on_host(weight)
        return weight.is_cpu and weight.nbytes <= _BY_AUTOGRAD

    def _fits(self, weight: Tensor, dtype: torch.dtype) -> bool:
        cast = self._kept.get((id(weight), dtype))
        return cast is not None and (cast.grad_fn.leaf, cast.shape, cast.stride()) == (  # type: ignore[union-attr]
            _leaf(weight),
            weight.shape,
            weight.stride(),
        )

    def _add(
        self, weights: Sequence[Tensor], dtype: torch.dtype, kernels: Kernels, memory: KeptMemory
    ) -> None:
        for weight, memory_of_cast in zip(weights, allocate(weights, dtype, memory), strict=True):
            with torch.enable_grad():
                cast: Tensor = _Accumulate.apply([memory_of_cast], kernels, memory, weight)  # type: ignore[no-untyped-call]
            self._written.pop((id(weight), dtype), None)
            self._kept[id(weight), dtype] = run_backward_early(cast)

    def keep_only(self, keys: Set[int]) -> None:
        """Free the casts of all weights except those whose ``id`` is in `keys`."""
        with self._lock:
            self._kept = {key: cast for key, cast in self._kept.items() if key[0] in keys}
            self._written = {key: value for key, value in self._written.items() if key in self._kept}

    def all(self) -> list[Tensor]:
        """Return every kept cast."""
        return list(self._kept.values())


_COPIED = 2**21
_ADDED = 2**17
"""Up to this many elements, torch's ``copy_`` and ``add_`` of one tensor beat a kernel."""


class _Accumulate(torch.autograd.Function):
    """Links a cast to its weight; saves no tensors, so one cast serves any number of backward passes."""

    @staticmethod
    def forward(ctx: Any, cast: list[Tensor], kernels: Kernels, memory: KeptMemory, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.kernels, ctx.memory = weight, kernels, memory
        ctx.leaf = _leaf(weight)
        ctx.lock = new_lock()  # torch allows backward passes of several threads
        return cast[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None, Tensor | None]:
        if grad is None:
            return None, None, None, None
        if is_compiled(ctx):
            return None, None, None, grad.to(ctx.weight.dtype)
        with ctx.lock:
            if not _goes_to_grad(ctx, grad):
                return None, None, None, grad.to(ctx.weight.dtype)
            total = ctx.weight.grad
            if total is None:
                ctx.weight.grad = _widened(grad, ctx.weight, ctx.kernels, ctx.memory)
            elif grad.numel() <= _ADDED:
                total.add_(grad)
            else:
                ctx.kernels.add_([total], [grad])
        return None, None, None, None


def _leaf(weight: Tensor) -> tuple[int, WeakStorage]:
    """Return a value that changes when torch may give `weight` another node for its gradients.

    It does for another dtype (`.double().float()`), and it poisons the node of a swapped tensor.
    """
    return identity_of(weight), weak_memory(weight)


def _goes_to_grad(node: Any, grad: Tensor) -> bool:
    """Return whether autograd would do nothing with `grad` but add it to the weight's ``.grad``."""
    weight = node.weight
    return (
        not torch.is_grad_enabled()  # create_graph=True
        and weight.requires_grad  # autograd has no gradient for a weight that was frozen since
        and not has_gradient_hooks(weight)
        and grad.layout is torch.strided
        and (weight.grad is None or (weight.grad.layout, weight.grad.dtype) == (torch.strided, weight.dtype))
        and getattr(weight, "grad_dtype", None) in (None, weight.dtype)  # an attribute since torch 2.13
        and gradient_is_accumulated(node.next_functions[0][0])
    )


def _widened(grad: Tensor, weight: Tensor, kernels: Kernels, memory: KeptMemory) -> Tensor:
    wide = memory.empty_like(weight, weight.dtype)  # fused optimizers read both in the order of memory
    if grad.numel() <= _COPIED:
        return wide.copy_(grad)
    kernels.cast([grad], wide.dtype, out=[wide])
    return wide
