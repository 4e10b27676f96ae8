"""`cached_casts`: a scope in which a model's weights are cast once."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from typing_extensions import Self

from amp_core._torch import cast_cache
from amp_core._torch.list_writes import see_list_writes
from amp_core._torch.op_kernels import POLICIES
from amp_core._torch.tensors import is_dtensor, part_of
from amp_core._torch.tracing import outside_graphs, untraced
from amp_core.casts.bulk import cast_weights, is_small_on_host
from amp_core.casts.cache import MakeCasts, WeightCache
from amp_core.casts.reuse import Reuse, only_reuse_pays
from amp_core.casts.unseen_writes import is_skipped, is_traced_and_seen, may_write_unseen
from amp_core.common.arguments import check_module
from amp_core.common.call_site import level_outside
from amp_core.common.fsdp import is_sharded
from amp_core.common.handle import LocalHandle
from amp_core.common.locks import new_lock
from amp_core.common.once import once
from amp_core.common.optimizers import (
    StepArguments,
    after_every_step,
    around_closure,
    before_every_step,
    parameters_of,
)
from amp_core.common.text import counted
from amp_core.dispatch import kept_operands
from amp_core.dispatch.engine import serve_casts
from amp_core.errors import AmpWarning


def nbytes_of(cast: Tensor) -> int:
    """Return the bytes of a cast, or of this rank's part of it, and of its quantised forms."""
    return part_of(cast).nbytes + kept_operands.nbytes(cast)


class CachedCasts(LocalHandle):
    """The result of `cached_casts`: a context manager, or a handle that is already active if persistent."""

    _COVERS_DTENSORS = True
    _FUNCTION = "cached_casts"

    def __init__(
        self,
        model: nn.Module,
        make: MakeCasts = cast_weights,
        is_small: Callable[[Tensor], bool] = is_small_on_host,
        *,
        debug: bool = False,
    ) -> None:
        check_module(model, self._FUNCTION)
        uncached = _uncached(model, self._COVERS_DTENSORS)
        if uncached:
            name = next(name for name, weight in model.named_parameters() if id(weight) in uncached)
            text = _UNCACHED.format(weights=counted(len(uncached), "weight"), name=name)
            warnings.warn(text, AmpWarning, stacklevel=level_outside())
        self._model = model
        self._modules: set[int] = set()  # ids, as of when the cache looked last
        weights = functools.partial(_weights, model, self._COVERS_DTENSORS, self._modules)
        self._cache = WeightCache(weights, make, is_small, debug=debug)
        self._reuse = Reuse()
        self._lock = new_lock()  # a signal handler may use the model, too
        self._is_active = False
        self._end_serving: Callable[[], None] | None = None

    @untraced
    def __enter__(self) -> Self:
        if self._is_active:
            raise RuntimeError(
                "This cached_casts scope is already active. Create one scope per `with` statement; do not "
                "enter a persistent one."
            )
        may_rest = self._model.training and torch.is_grad_enabled() and POLICIES.works()
        if not (may_rest and self._only_reuse_pays()):
            self._end_serving = self._begin_serving()
        self._is_active = True
        before_every_step(_drop_before)
        after_every_step(_drop_stepped)
        see_list_writes()
        _see_new_parts()
        cast_cache.when_regions_end(_after_region)
        _scopes.add(self)
        return self

    def _only_reuse_pays(self) -> bool:
        return not self._cache.debug and only_reuse_pays(self._cache.weights())

    def _begin_serving(self) -> Callable[[], None]:
        self._cache.is_kept = True
        return serve_casts(self._cache, self._device_types())

    def _serve(self) -> None:
        """Let ops use the casts."""
        with self._lock:
            if self._is_active and self._end_serving is None:
                self._end_serving = self._begin_serving()

    def _rest(self) -> None:
        """Leave ops to torch's kernels, and free the casts."""
        with self._lock:
            if self._end_serving is not None:
                end, self._end_serving = self._end_serving, None
                end()
                self._cache.is_kept = False  # before they are dropped
                self._cache.invalidate()
                self._cache.memory.clear()

    def _after_region(self) -> None:
        grew = self._end_serving is None and self._cache.is_outdated and not self._only_reuse_pays()
        if self._reuse.after_region(self._cache.weights) or grew:
            self._serve()

    def _after_step(self, weights: list[Tensor], *, skipped: bool) -> None:
        if self._cache.has_any(weights):
            if not skipped:  # graphs from before stay valid
                self._cache.invalidate(weights)
            if self._reuse.after_step() and self._end_serving is not None and self._only_reuse_pays():
                self._rest()

    def _device_types(self) -> set[str]:
        """Return the device types of the weights, including those that meta weights may move to."""
        types = {device.type for device in self._cache.devices()}
        if "meta" in types:
            accelerator = torch.accelerator.current_accelerator()
            types |= {"cpu"} if accelerator is None else {"cpu", accelerator.type}
        return types

    def invalidate(self, weights: Iterable[Tensor] | None = None) -> None:
        """Drop the casts of `weights` (default: all) after a write that torch cannot detect.

        Raises:
            TypeError: `weights` is no iterable of tensors.
        """
        listed = self._cache.weights() if weights is None else _listed(weights)
        for scope in {self, *_scopes}:  # scopes of one model share casts
            scope._forget(listed)

    def _forget(self, weights: list[Tensor]) -> None:
        self._cache.invalidate(weights)

    @untraced
    def remove(self) -> None:
        """End the scope and free the casts. Calling it again has no effect."""
        _scopes.discard(self)
        with self._lock:
            self._is_active = False
            self._rest()

    def nbytes(self) -> int:
        """Return the bytes of the casts, plain and quantised, and of memory kept for later ones."""
        return sum(map(nbytes_of, self._cache.casts())) + self._cache.memory.idle_nbytes()


def _listed(weights: Iterable[Tensor]) -> list[Tensor]:
    # The rows of a tensor are no weights: for a single one, nothing would be dropped.
    is_several = isinstance(weights, Iterable) and not isinstance(weights, (Tensor, str))
    listed = [*weights] if is_several else []
    if not is_several or not all(isinstance(weight, Tensor) for weight in listed):
        raise TypeError(
            f"invalidate() needs a list of weights, such as [model.weight], not {type(weights).__name__}."
        )
    return listed


_scopes: set[CachedCasts] = set()


@once
def _see_new_parts() -> None:
    """Call `_part_was_added` from now on and for good, as `after_every_step` does."""
    register_module_parameter_registration_hook(_part_was_added)
    register_module_module_registration_hook(_part_was_added)


def _part_was_added(module: nn.Module, _name: str, part: Tensor | nn.Module | None) -> None:
    if part is not None:
        for scope in list(_scopes):
            scope._cache.look_again(part, of_model=id(module) in scope._modules)


def _drop_before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
    """Drop casts before a step that may write without changing version counters, and before its closures.

    `_drop_stepped` is too late for these and for the step's own hooks, and does not run if the step raises.
    """
    if torch.compiler.is_dynamo_compiling() or not _scopes:
        return None
    if is_skipped(optimizer) or not may_write_unseen(optimizer):
        return None
    _drop(optimizer)
    return around_closure(args, kwargs, before=functools.partial(_drop, optimizer))


def _drop(optimizer: Optimizer) -> None:
    for scope in list(_scopes):
        scope._cache.invalidate(parameters_of(optimizer))


def _drop_stepped(optimizer: Optimizer) -> None:
    """Drop casts of stepped weights: fused optimizers write without changing version counters."""
    if not is_traced_and_seen(optimizer):
        _after_step(optimizer)


@outside_graphs
def _after_step(optimizer: Optimizer) -> None:
    skipped = is_skipped(optimizer)
    for scope in list(_scopes):
        scope._after_step(parameters_of(optimizer), skipped=skipped)


def _after_region() -> None:
    for scope in list(_scopes):
        scope._after_region()


def _weights(model: nn.Module, dtensors: bool, modules: set[int]) -> Iterator[tuple[str, Tensor]]:
    present = set(map(id, model.modules()))
    modules |= present  # in two steps: another thread may look for a module meanwhile
    modules &= present
    uncached = _uncached(model, dtensors)
    return ((name, weight) for name, weight in model.named_parameters() if id(weight) not in uncached)


def _uncached(model: nn.Module, dtensors: bool) -> set[int]:
    """Return the ``id`` of each weight that is of another type than those covered, or that FSDP shards.

    FSDP gathers a weight into the same memory without changing its version, so no cast of it can be trusted.
    """
    sharded = {id(p) for m in model.modules() if is_sharded(m) for p in m.parameters()}
    return sharded | {id(p) for p in model.parameters() if not _is_covered(p, dtensors)}


def _is_covered(weight: Tensor, dtensors: bool) -> bool:
    return type(weight) in (nn.Parameter, Tensor) or (dtensors and is_dtensor(weight))


_UNCACHED = (
    "This scope leaves {weights}, starting with {name!r}, to be cast at each use, as without it. Either FSDP "
    "shards them, and gathers other values into the same memory unnoticed, or this scope does not cover "
    "their tensor type. FSDP itself can cast once per all-gather, with "
    "fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))."
)


@untraced
def cached_casts(model: nn.Module, *, persistent: bool = False, debug: bool = False) -> CachedCasts:
    """Cast each weight of `model` once and reuse the cast until the weight changes.

    ``torch.autocast`` casts weights again in every outermost region, and frozen ones at every use.
    In this scope a cast persists across regions, micro-batches and inference calls. On CPUs, a model whose
    weights are all trained and of up to 4 MiB is left to torch while each optimizer step follows one region.

    A cast is renewed when the weight's version counter, memory, shape, strides or ``requires_grad`` change
    (in-place updates, ``load_state_dict``, ``.to()``, ``.data = ...``). It is also renewed after an optimizer
    step (fused optimizers do not change the version counter), when a weight above 4 MiB gains its first
    gradient hook or loses its last, and when another parameter replaces the weight in the model. Gradients
    are bit-equal to plain autocast's, unless one backward pass reaches uses of a weight in several regions:
    these are summed in the lower precision.

    Writes through ``.data`` (``w.data += ...`` too) or a NumPy view, or by other processes (shared memory),
    cannot be detected: call `CachedCasts.invalidate` after them.
    Under ``torch.compile`` and selective checkpointing the scope has no effect: the compiler plans its own
    casts, and a checkpoint numbers them. DTensors, as tensor parallelism has them, are covered. Weights that
    FSDP shards are cast at each use, with a warning.

    Args:
        model: the model whose float32 parameters, including frozen ones, are covered.
        persistent: activate the scope now and until ``remove()``; for inference. It keeps the model in
            memory until then.
        debug: check each cast against its weight at every use; slow.

    Returns:
        A context manager that is also the handle for ``invalidate()``, ``remove()`` and ``nbytes()``. The
        casts take half the bytes of the weights that low-precision ops use. On the CPU, the memory of casts
        and gradients is kept from step to step, up to the amount that ``zero_grad()`` frees.

    Raises:
        StaleCastError: in debug mode, at the use of a weight that was written to undetected.
        RuntimeError: an active scope is entered again.
        TypeError: `model` is no module.

    Warns:
        AmpWarning: FSDP shards some weights, or they are of another tensor type; these are cast at each use.

    Example:
        >>> import torch, amp_core
        >>> model = torch.nn.Linear(2, 2)
        >>> with amp_core.cached_casts(model) as casts, amp_core.autocast("cpu"):
        ...     y = model(torch.ones(1, 2))
        ...     y = model(y)  # uses the same cast
        >>> y.dtype
        torch.bfloat16
    """
    scope = CachedCasts(model, debug=debug)
    return scope.__enter__() if persistent else scope
