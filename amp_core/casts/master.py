"""`master_weights`: train on low-precision weights, keep and update them in float32."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_core.casts.accumulating import AccumulatingCasts
from amp_core.casts.scope import CachedCasts


class MasterWeights(CachedCasts):
    """What `master_weights` returns: a handle that is already on; also a context manager."""

    def __init__(self, model: nn.Module, *, debug: bool = False) -> None:
        reduced = any(isinstance(m, DistributedDataParallel) for m in model.modules())
        self._casts = AccumulatingCasts(reduced)
        super().__init__(model, self._casts.cast, debug=debug)
        super().__enter__()

    def __enter__(self) -> MasterWeights:
        if self._release is None:
            raise RuntimeError(
                "These master_weights were removed. Call master_weights(model) again to switch them on."
            )
        return self

    def remove(self) -> None:
        """Go back to plain autocast and free the low-precision weights. Harmless when done already."""
        super().remove()
        self._casts.keep_only(set())

    def nbytes(self) -> int:
        """Return the bytes that the low-precision weights take now."""
        self._casts.keep_only(set(self._cache.keys()))  # parameters may have been replaced
        live = {id(cast): cast for cast in [*self._casts.all(), *self._cache.casts()]}
        return sum(cast.nbytes for cast in live.values()) + self._cache.memory.idle_nbytes()


def master_weights(model: nn.Module, *, debug: bool = False) -> MasterWeights:
    """Train `model` on low-precision weights whose float32 masters are the model's own parameters.

    In autocast regions, low-precision ops use a copy of each weight in that precision. All copies are made in
    one call per optimizer step, into storage that is kept. A backward pass adds the gradient of a copy to the
    parameter's float32 ``.grad`` right away, so that micro-batches accumulate in float32. This is the
    arithmetic of apex O2, Megatron and DeepSpeed, but nothing else of a program changes: ``parameters()``,
    ``state_dict()``, optimizers (fused ones too), `GradScaler`, clipping and checkpoints see float32. Weights
    that only float32 ops use, such as those of norms and embeddings, have no copy. The storage of gradients
    is kept over ``zero_grad()``.

    Gradients are bit-equal to plain autocast's, with two exceptions. Uses of one weight in several regions
    that one backward pass reaches are summed in the lower precision. A weight that ops of both precisions
    use, such as a tied embedding, may differ in the order of a float32 sum.

    ``backward(inputs=...)``, ``autograd.grad``, ``create_graph=True``, hooks on weights and
    DistributedDataParallel work as without it; there, gradients go through autograd. Hooks on a weight's
    ``AccumulateGrad`` node run once ``.grad`` is complete, and get None for the gradient.
    Under ``torch.compile`` and ``torch.func`` it has no effect, as `cached_casts`.

    Args:
        model: its float32 parameters are the masters. Wrap it in DistributedDataParallel first, if you use
            that.
        debug: compare each copy with its master at every use; slow.

    Returns:
        The handle. ``remove()``, or leaving a ``with`` block, goes back to plain autocast. Call
        ``invalidate()`` after a write that torch cannot see. ``nbytes()`` returns the memory in use: 2 bytes
        per element of the weights that low-precision ops use.

    Raises:
        StaleCastError: in debug mode, if a weight changed in a way that torch cannot see.
        RuntimeError: the handle is entered after ``remove()``.
    """
    return MasterWeights(model, debug=debug)
