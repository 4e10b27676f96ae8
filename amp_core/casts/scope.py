"""`cached_casts`: the span of a program in which a model's weights are cast once."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_core.casts.bulk import cast_weights
from amp_core.casts.cache import MakeCasts, WeightCache
from amp_core.common.call_site import level_outside
from amp_core.dispatch.engine import serve_casts
from amp_core.errors import AmpWarning


class CachedCasts:
    """What `cached_casts` returns: a context manager, or, when persistent, a handle that is already on."""

    def __init__(self, model: nn.Module, make: MakeCasts = cast_weights, *, debug: bool = False) -> None:
        left = _left_alone(model)
        if left:
            name = next(name for name, weight in model.named_parameters() if id(weight) in left)
            warnings.warn(_LEFT.format(count=len(left), name=name), AmpWarning, stacklevel=level_outside())
        self._cache = WeightCache(lambda: _weights(model), make, debug=debug)
        self._release: Callable[[], None] | None = None

    def __enter__(self) -> CachedCasts:
        if self._release is not None:
            raise RuntimeError(
                "This cached_casts scope is already on. Make one scope per `with` statement, or leave the "
                "persistent one on and do not enter it."
            )
        release_ops = serve_casts(self._cache, self._device_types())
        _watch_optimizers()
        _scopes.add(self)

        def release() -> None:
            _scopes.discard(self)
            release_ops()
            self._cache.invalidate()
            self._cache.memory.clear()

        self._release = release
        return self

    def _device_types(self) -> set[str]:
        """Return the devices that the weights are on, or will be once they leave the meta device."""
        types = {device.type for device in self._cache.devices()}
        if "meta" in types:
            accelerator = torch.accelerator.current_accelerator()
            types |= {"cpu"} if accelerator is None else {"cpu", accelerator.type}
        return types

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def invalidate(self, weights: Iterable[Tensor] | None = None) -> None:
        """Drop the casts of `weights` (default: all), after a write that torch cannot see."""
        self._cache.invalidate(weights)

    def remove(self) -> None:
        """Switch the scope off and free the casts. Harmless when it is off already."""
        if self._release is not None:
            release, self._release = self._release, None
            release()

    def nbytes(self) -> int:
        """Return the bytes that the casts take now, with memory that is kept for the next ones."""
        return sum(cast.nbytes for cast in self._cache.casts()) + self._cache.memory.idle_nbytes()


_scopes: set[CachedCasts] = set()


@functools.cache
def _watch_optimizers() -> None:
    # One hook, for good: torch iterates over its hooks in other threads while scopes come and go.
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Drop casts of stepped weights: fused optimizers write without moving version counters."""
    for scope in list(_scopes):
        for group in optimizer.param_groups:
            scope.invalidate(group["params"])


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    left = _left_alone(model)
    return ((name, weight) for name, weight in model.named_parameters() if id(weight) not in left)


def _left_alone(model: nn.Module) -> set[int]:
    """Return the ``id`` of each weight that is no plain tensor, or whose memory a wrapper takes and refills.

    FSDP gathers a weight into the same memory again without moving its version: no cast of it can be trusted.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrappers = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp is not None else ()
    sharded = {id(p) for m in model.modules() if isinstance(m, wrappers) for p in m.parameters()}
    return sharded | {id(p) for p in model.parameters() if type(p) not in (nn.Parameter, Tensor)}


_LEFT = (
    "{count} weights, {name!r} the first, are cast at each use, as without this scope: they are sharded "
    "(FSDP, DTensor) or of another tensor type. FSDP itself casts once per gathering, with "
    "fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))."
)


def cached_casts(model: nn.Module, *, persistent: bool = False, debug: bool = False) -> CachedCasts:
    """Cast each weight of `model` once and use the cast until the weight changes.

    ``torch.autocast`` casts weights again in every outermost region, and frozen ones at every use.
    Within this scope a cast lives on across regions, micro-batches and inference calls. It is made
    again when the weight's version counter, memory, shape, strides or ``requires_grad`` have changed
    (in-place updates, ``load_state_dict``, ``.to()``, ``.data = ...``), when it has got its first gradient
    hook or lost the last, when an optimizer has stepped (fused ones move no counter), or when the model has
    another parameter in its place. Gradients are bit-equal to plain autocast's.

    Writes through ``.data`` or a NumPy view cannot be seen: call `CachedCasts.invalidate` after them.
    Under ``torch.compile`` the scope has no effect: the compiler plans its own casts. Sharded weights (FSDP,
    DTensor) are cast at each use, with a warning.

    Args:
        model: its float32 parameters are covered, frozen ones too.
        persistent: switch the scope on now, until ``remove()``; for inference.
        debug: compare each cast with its weight at every use; slow.

    Returns:
        A context manager, and the handle for ``invalidate()``, ``remove()`` and ``nbytes()``. The
        casts take half the bytes of the weights that low-precision ops use. On the CPU the memory of
        casts and of gradients is kept from step to step: as much again as ``zero_grad()`` sets free.

    Raises:
        StaleCastError: in debug mode, when a weight was written to unseen.
    """
    scope = CachedCasts(model, debug=debug)
    return scope.__enter__() if persistent else scope
