"""`master_weights`: train on low-precision weights, keep and update them in float32."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_core.casts.leaves import Leaves
from amp_core.casts.scope import CachedCasts


class MasterWeights(CachedCasts):
    """What `master_weights` returns: a handle that is already on, and a context manager."""

    def __init__(self, model: nn.Module, *, debug: bool = False) -> None:
        self._leaves = Leaves(reduced=any(isinstance(m, DistributedDataParallel) for m in model.modules()))
        super().__init__(model, self._leaves.cast, debug=debug)
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
        self._leaves.keep_only(set())

    def nbytes(self) -> int:
        """Return the bytes that the low-precision weights take now."""
        self._leaves.keep_only(set(self._cache.keys()))  # a parameter may have been put in place of another
        held = {id(cast): cast for cast in [*self._leaves.all(), *self._cache.casts()]}
        return sum(cast.nbytes for cast in held.values()) + self._cache.memory.idle_nbytes()


def master_weights(model: nn.Module, *, debug: bool = False) -> MasterWeights:
    """Train `model` on low-precision weights whose float32 masters are the model's own parameters.

    In autocast regions, ops that run in the lower precision use a copy of each weight in that
    precision, made once per optimizer step, all in one call, into storage that is kept. A backward
    pass ends at the copy, and its gradient is added to the parameter's float32 ``.grad`` right away,
    so that micro-batches accumulate in float32. This is the arithmetic of apex O2, Megatron and
    DeepSpeed, but nothing else of a program changes: ``parameters()``, ``state_dict()``, optimizers
    (fused ones too), `GradScaler`, clipping, checkpoints see float32. Weights that float32 ops use,
    such as those of norms and embeddings, have no copy. The storage of gradients is kept
    over ``zero_grad()``.

    Gradients are bit-equal to plain autocast's, with these exceptions: uses of one weight in several
    regions that one backward pass reaches are summed in the lower precision; and a weight that ops of
    both precisions use, such as a tied embedding, may differ in the order of a float32 sum.

    The parameters are not in the autograd graph: ``autograd.grad`` and ``backward(inputs=...)`` with
    respect to them, and double backward, need `cached_casts`. Weights that carry gradient hooks, and
    all weights within DistributedDataParallel, are cast through autograd, as `cached_casts` does it.
    Under ``torch.compile`` it has no effect, as `cached_casts`.

    Args:
        model: its float32 parameters are the masters. Pass the model as it is called: already wrapped
            in DistributedDataParallel, if it is to be.
        debug: compare each copy with its master at every use; slow.

    Returns:
        The handle: ``remove()`` (or leaving a ``with``) goes back to plain autocast, ``invalidate()``
        follows a write that torch cannot see, ``nbytes()`` tells the memory: 2 bytes for each element
        of a weight that low-precision ops use.

    Raises:
        StaleCastError: in debug mode, when a weight was written to unseen.
    """
    return MasterWeights(model, debug=debug)
