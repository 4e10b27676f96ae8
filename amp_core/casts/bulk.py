"""Cast many weights in one kernel call, and their gradients back in one call per bucket."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_core._torch.autograd import has_gradient_hooks, is_compiled, run_as_soon_as_ready
from amp_core._torch.tensors import is_dtensor
from amp_core._torch.tracing import are_batches
from amp_core.casts.memory import KeptMemory
from amp_core.common.cast import to_dtype
from amp_core.kernels import Kernels

BUCKET_BYTES = 25 * 2**20
"""Bytes of source weights per bucket: DistributedDataParallel's default, so its all-reduces still overlap
with the backward pass."""

_SMALL = 2**20
"""Up to this many bytes per weight, a plain cast beats kernel dispatch."""

SMALL_ON_HOST = 2**22
"""Up to this many bytes, a CPU's plain casts of many weights beat one call for all, and a scope saves nothing
if each cast is used in one region: the CPU's caches still have casts and gradients when they are read."""


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
    # Weights arrive singly at their first use; kernels know no placements.
    if is_dtensor(weights[0]) or (len(weights) == 1 and weights[0].nbytes <= _SMALL):
        return [cast_alone(weight, dtype) for weight in weights]
    with torch.inference_mode(mode=False), torch.enable_grad():  # see cast_alone
        parts = list(buckets(weights))
        storage = [allocate(part, dtype, memory) for part in parts]
        casts = [cast for some in storage for cast in some]
        kernels.cast(weights, dtype, out=casts)
        if not weights[0].requires_grad:
            return casts
        linked = [
            _BucketCast.apply(some, kernels, memory, *part)  # type: ignore[no-untyped-call]
            for some, part in zip(storage, parts, strict=True)
        ]
    return [cast for first, *rest in linked for cast in (run_backward_early(first), *rest)]


def cast_alone(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `weight` cast to `dtype` by torch; gradients flow back to it, whatever the grad mode."""
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        return run_backward_early(to_dtype(weight, dtype))
    # A later training step could not use a cast created in inference mode.
    with torch.inference_mode(mode=False), torch.enable_grad():
        return run_backward_early(to_dtype(weight, dtype))


def looks_for_hooks(cast: Tensor) -> bool:
    """Return whether a backward pass through `cast` looks for gradient hooks of the weight when it runs."""
    return hasattr(cast.grad_fn, "leaf")


def is_small_on_host(weight: Tensor) -> bool:
    """Return whether it is faster to let torch cast `weight` when an op needs it than all in one call."""
    return weight.is_cpu and weight.nbytes <= SMALL_ON_HOST


def run_backward_early(cast: Tensor) -> Tensor:
    """Let autograd run the node of `cast` as soon as its gradients are ready; return `cast`.

    Autograd runs the newest node first, and casts are older than the forward pass. Otherwise gradients would
    stay in memory until the end of the backward pass, and DDP would have nothing to overlap.
    """
    if cast.requires_grad:
        run_as_soon_as_ready(cast)
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
        # create_graph=True: the cast must be differentiable. Batches of gradients have no memory.
        if torch.is_grad_enabled() or is_compiled(ctx) or are_batches([g for _, g in present]):
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
        alone = has_gradient_hooks(weight)
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
    whole = memory.empty(total, dtype, weights[0].device)
    # `.data`: casts are not views of each other, and a write to one does not change the version of all.
    return [
        whole.as_strided(w.shape, w.stride(), offset).data for w, offset in zip(weights, offsets, strict=True)
    ]
