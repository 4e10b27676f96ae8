"""Cast many weights in one kernel call, and their gradients back in one call per bucket."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_core._torch import internals as _torch
from amp_core.casts.memory import KeptMemory
from amp_core.kernels import Kernels

BUCKET_BYTES = 25 * 2**20
"""Bytes of source weights per bucket: DistributedDataParallel's default, so its all-reduces still overlap
with the backward pass."""

_SMALL = 2**20
"""Up to this many bytes per weight, a plain cast beats kernel dispatch."""


def cast_weights(
    weights: Sequence[Tensor], dtype: torch.dtype, kernels: Kernels, memory: KeptMemory
) -> list[Tensor]:
    """Return `weights` cast to `dtype`; gradients flow back to them, whatever the grad mode.

    Args:
        weights: float32 leaves on one device, all with the same ``requires_grad``; all DTensors or none.
        dtype: the dtype of the casts.
        kernels: provides ``cast``.
        memory: provides memory for the casts and their float32 gradients.
    """
    # A later training step could not use a cast created in inference mode.
    with torch.inference_mode(mode=False), torch.enable_grad():
        if len(weights) == 1 and weights[0].nbytes <= _SMALL:  # weights arrive singly at their first use
            return [run_backward_early(weights[0].to(dtype))]
        if weights and _torch.is_dtensor(weights[0]):  # kernels know no placements
            return [run_backward_early(weight.to(dtype)) for weight in weights]
        parts = list(buckets(weights))
        storage = [allocate(part, dtype, memory) for part in parts]
        casts = kernels.cast(weights, dtype, out=[cast for some in storage for cast in some])
        if not weights or not weights[0].requires_grad:
            return casts
        linked = [
            _BucketCast.apply(some, kernels, memory, *part)  # type: ignore[no-untyped-call]
            for some, part in zip(storage, parts, strict=True)
        ]
    return [cast for first, *rest in linked for cast in (run_backward_early(first), *rest)]


def run_backward_early(cast: Tensor) -> Tensor:
    """Let autograd run the node of `cast` as soon as its gradients are ready; return `cast`.

    Autograd runs the newest node first, and casts are older than the forward pass. Otherwise gradients would
    stay in memory until the end of the backward pass, and DDP would have nothing to overlap.
    """
    if cast.requires_grad:
        _torch.run_as_soon_as_ready(cast)
    return cast


class _BucketCast(torch.autograd.Function):
    """Links casts to their weights; saves no tensors, so one cast serves any number of backward passes."""

    @staticmethod
    def forward(
        ctx: Any, casts: list[Tensor], kernels: Kernels, memory: KeptMemory, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.kernels, ctx.memory = kernels, memory
        ctx.source_dtypes = [w.dtype for w in weights]
        return tuple(casts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [(i, g) for i, g in enumerate(grads) if g is not None]
        result: list[Tensor | None] = [None] * len(grads)
        if torch.is_grad_enabled():  # create_graph=True: the cast back must be differentiable too
            for i, grad in present:
                result[i] = grad.to(ctx.source_dtypes[i])
        elif present:
            for i, grad in present:
                result[i] = ctx.memory.empty_like(grad, ctx.source_dtypes[i])
            ctx.kernels.cast(
                [g for _, g in present], ctx.source_dtypes[0], out=[result[i] for i, _ in present]
            )
        return (None, None, None, *result)


def buckets(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield `weights` in order, in buckets of at most `BUCKET_BYTES` (or one weight).

    A weight with a gradient hook gets its own bucket: a backward pass that reaches one weight of a bucket
    calls the hooks of all of them, with None for the weights it does not reach.
    """
    bucket: list[Tensor] = []
    size = 0.0
    for weight in weights:
        alone = _torch.has_gradient_hooks(weight)
        if bucket and (alone or size + weight.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0.0
        bucket.append(weight)
        size += math.inf if alone else weight.nbytes
    if bucket:
        yield bucket


def allocate(weights: Sequence[Tensor], dtype: torch.dtype, memory: KeptMemory) -> list[Tensor]:
    """Return uninitialized tensors like `weights` of another dtype; in one storage if all are contiguous."""
    if not all(w.is_contiguous() for w in weights):
        return [torch.empty_like(w, dtype=dtype, requires_grad=False) for w in weights]
    align = 64 // dtype.itemsize
    offsets, total = [], 0
    for weight in weights:
        offsets.append(total)
        total += -(-weight.numel() // align) * align
    storage = memory.empty(total, dtype, weights[0].device).untyped_storage()
    return [
        torch.empty(0, dtype=dtype, device=w.device).set_(storage, offset, w.shape, w.stride())
        for w, offset in zip(weights, offsets, strict=True)
    ]
