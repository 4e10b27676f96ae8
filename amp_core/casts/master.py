"""`master_weights`: train with low-precision weights; keep and update them in float32."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Self

from amp_core._torch.tracing import untraced
from amp_core.casts.accumulating import AccumulatingCasts
from amp_core.casts.scope import CachedCasts, nbytes_of
from amp_core.casts.stored import StoredWeights
from amp_core.common.arguments import as_whole, check_module, check_optimizer


class MasterWeights(CachedCasts):
    """The handle that `master_weights` returns, already active; also a context manager."""

    _FUNCTION = "master_weights"
    _COVERS_DTENSORS = False  # gradients are added to ``.grad`` by kernels, which know no placements

    def __init__(self, model: nn.Module, *, debug: bool = False) -> None:
        check_module(model, self._FUNCTION)
        reduced = any(isinstance(m, DistributedDataParallel) for m in model.modules())
        self._casts = AccumulatingCasts(reduced)
        super().__init__(model, self._casts.cast, self._casts.is_small, debug=debug)
        self._casts.serve(self._cache)
        super().__enter__()

    def __enter__(self) -> Self:
        if not self._is_active:
            raise RuntimeError(
                "These master_weights were removed. Call master_weights(model) again to enable them."
            )
        return self

    def _rest(self) -> None:
        super()._rest()
        self._casts.keep_only(set())

    def _forget(self, weights: list[torch.Tensor]) -> None:
        self._casts.keep_only(self._cache.keys() - set(map(id, weights)))  # a graph may need their casts
        super()._forget(weights)

    def nbytes(self) -> int:
        """Return the bytes that the low-precision weights occupy now, with their quantised forms."""
        self._casts.keep_only(self._cache.keys())  # parameters may have been replaced
        live = {id(cast): cast for cast in [*self._casts.all(), *self._cache.casts()]}
        return sum(map(nbytes_of, live.values())) + self._cache.memory.idle_nbytes()


@overload
def master_weights(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    storage: Literal["fp32"] = "fp32",
    *,
    debug: bool = False,
) -> MasterWeights: ...
@overload
def master_weights(
    model: nn.Module,
    optimizer: Optimizer,
    storage: Literal["remainder", "stochastic", "kahan"],
    *,
    seed: int = 0,
    state_dtype: torch.dtype = torch.float32,
    keep: Iterable[str] = (),
    lost_updates: bool = False,
) -> StoredWeights: ...
@untraced
def master_weights(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    storage: str = "fp32",
    *,
    debug: bool = False,
    seed: int = 0,
    state_dtype: torch.dtype = torch.float32,
    keep: Iterable[str] = (),
    lost_updates: bool = False,
) -> MasterWeights | StoredWeights:
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
    DistributedDataParallel work as usual; in these cases gradients go through autograd, as those of a CPU's
    weights of up to 256 KiB always do. Otherwise, hooks on a weight's ``AccumulateGrad`` node receive None as
    the gradient; they run once ``.grad`` is complete.
    Like `cached_casts`, it has no effect under ``torch.compile``, ``torch.func`` and selective checkpointing,
    and leaves small models on the CPU to torch while each optimizer step follows one region.

    With another `storage`, the parameters themselves become bfloat16 and there are no masters. The optimizer
    steps in float32 on one bucket of parameters after another; then the storage decides what stays, in the
    optimizer's state.

    Args:
        model: the model whose float32 parameters are the masters. If you use DistributedDataParallel, wrap
            the model first; with bfloat16 storage, afterwards.
        optimizer: steps the parameters; only for bfloat16 storage. It may be any but LBFGS;
            of an optimizer that steps another one (``ZeroRedundancyOptimizer``), pass the inner one. Before
            ``ZeroRedundancyOptimizer``, call ``model.to(torch.bfloat16)``: a rank has some of the parameters.
        storage: ``"fp32"``; or for bfloat16 weights ``"remainder"`` (the other 16 bits of the float32 weight,
            exact), ``"kahan"`` (a bfloat16 compensation) or ``"stochastic"`` (stochastic rounding; nothing).
        debug: check each copy against its master at every use; slow. Only for ``"fp32"``.
        seed: of stochastic rounding. The same seed gives the same bits on every device and, but for FSDP1
            and ``ZeroRedundancyOptimizer``, number of ranks.
        state_dtype: float32, or bfloat16 (rounded stochastically) to halve the optimizer's states.
        keep: globs over names of parameters that stay as they are, such as ``"**.norm.*"``: ``*`` matches one
            part of a name, ``**`` any number. Those of a batch norm with float32 statistics always do.
        lost_updates: count them at each step, for `StoredWeights.lost_updates`.

    Returns:
        The handle. ``remove()``, or leaving a ``with`` block, returns to plain autocast; until then float32
        masters keep the model in memory. Call ``invalidate()`` after a write that torch cannot detect.
        ``nbytes()`` returns the memory in use: 2 bytes per element of the weights that low-precision ops use.

    Raises:
        StaleCastError: in debug mode, at the use of a weight that changed in a way torch cannot detect.
        RuntimeError: the handle is entered after ``remove()``, or ``optimizer.step`` was replaced before.
        ValueError: the storage is unknown or has no use for an argument, or no parameter can be stored,
            or float32 ones are in a DistributedDataParallel, sharded or without memory, or some are sparse,
            of another library's tensor type or two for one memory; or `optimizer` steps another one.
        PolicyError: a glob of `keep` matches no parameter.
        TypeError: `optimizer` is not a ``torch.optim.Optimizer``.

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
    if storage == "fp32":
        if optimizer is not None:
            check_optimizer(optimizer, "master_weights")
        given = {
            "keep": not isinstance(keep, (tuple, list)) or bool(keep),
            "state_dtype": state_dtype is not torch.float32,
            "lost_updates": lost_updates,
            "seed": as_whole(seed, "seed") != 0,
        }
        _refuse(given, 'a bfloat16 storage, such as storage="remainder"')
        return MasterWeights(model, debug=debug)
    _refuse({"debug": debug}, 'storage="fp32"')
    return StoredWeights(
        model,
        optimizer,
        storage,
        seed=seed,
        state_dtype=state_dtype,
        keep=keep,
        lost_updates=lost_updates,
    )


def _refuse(given: dict[str, bool], needed: str) -> None:
    """Raise ValueError for arguments that have no effect without what is needed."""
    for name, is_given in given.items():
        if is_given:
            raise ValueError(f"master_weights({name}=...) needs {needed}; it would have no effect here.")
