"""`master_weights`: train with low-precision weights; keep and update them in float32."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_core.casts.accumulating import AccumulatingCasts
from amp_core.casts.scope import CachedCasts


class MasterWeights(CachedCasts):
    """The handle that `master_weights` returns, already active; also a context manager."""

    def __init__(self, model: nn.Module, *, debug: bool = False) -> None:
        reduced = any(isinstance(m, DistributedDataParallel) for m in model.modules())
        self._casts = AccumulatingCasts(reduced)
        super().__init__(model, self._casts.cast, debug=debug)
        super().__enter__()

    def __enter__(self) -> MasterWeights:
        if self._release is None:
            raise RuntimeError(
                "These master_weights were removed. Call master_weights(model) again to enable them."
            )
        return self

    def remove(self) -> None:
        """Return to plain autocast and free the low-precision weights. Calling it again has no effect."""
        super().remove()
        self._casts.keep_only(set())

    def nbytes(self) -> int:
        """Return the bytes that the low-precision weights occupy now."""
        self._casts.keep_only(set(self._cache.keys()))  # parameters may have been replaced
        live = {id(cast): cast for cast in [*self._casts.all(), *self._cache.casts()]}
        return sum(cast.nbytes for cast in live.values()) + self._cache.memory.idle_nbytes()


def master_weights(model: nn.Module, *, debug: bool = False) -> MasterWeights:
    """Train `model` with low-precision weights; its own float32 parameters are the masters.

    In autocast regions, low-precision ops use a low-precision copy of each weight. One call per optimizer
    step updates all copies, in storage that is reused. A backward pass adds the gradient of a copy directly
    to the parameter's float32 ``.grad``, so micro-batches accumulate in float32. The arithmetic is that of
    apex O2, Megatron and DeepSpeed, but the rest of the program does not change: ``parameters()``,
    ``state_dict()``, optimizers (including fused ones), `GradScaler`, clipping and checkpoints see float32.
    Weights that only float32 ops use, such as those of norms and embeddings, have no copy. The storage of
    gradients is kept across ``zero_grad()``.

    Gradients are bit-equal to plain autocast's, with two exceptions. If one backward pass reaches uses of a
    weight in several regions, they are summed in the lower precision. For a weight that ops of both
    precisions use, such as a tied embedding, the order of a float32 sum may differ.

    ``backward(inputs=...)``, ``autograd.grad``, ``create_graph=True``, hooks on weights and
    DistributedDataParallel work as usual; in these cases gradients go through autograd. Hooks on a weight's
    ``AccumulateGrad`` node run once ``.grad`` is complete and receive None as the gradient.
    Like `cached_casts`, it has no effect under ``torch.compile`` and ``torch.func``.

    Args:
        model: the model whose float32 parameters are the masters. If you use DistributedDataParallel, wrap
            the model first.
        debug: check each copy against its master at every use; slow.

    Returns:
        The handle. ``remove()``, or leaving a ``with`` block, returns to plain autocast. Call
        ``invalidate()`` after a write that torch cannot detect. ``nbytes()`` returns the memory in use: 2
        bytes per element of the weights that low-precision ops use.

    Raises:
        StaleCastError: in debug mode, at the use of a weight that changed in a way torch cannot detect.
        RuntimeError: the handle is entered after ``remove()``.

    Warns:
        AmpWarning: some weights are sharded or of another tensor type and are cast at each use.

    Example:
        >>> import torch, amp_core
        >>> model = torch.nn.Linear(2, 2)
        >>> with amp_core.master_weights(model), amp_core.autocast("cpu"):
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> model.weight.grad.dtype
        torch.float32
    """
    return MasterWeights(model, debug=debug)
