"""Read gradients during the backward, soon after each is written."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from amp_core._torch.dynamo import never_compile
from amp_core._torch.list_writes import see_list_writes
from amp_core._torch.tensors import version_of
from amp_core.common.locks import new_lock
from amp_core.kernels import GradStats
from amp_core.plugin.default_manager import get_backend
from amp_core.scaling.distributed import WHOLE
from amp_core.scaling.gradients import Gradients, kernels_of, read_once

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_ORDERS = 16
"""Number of cached index tensors; an optimizer needs one, unless gradients arrive in varying order."""


class _Read(NamedTuple):
    """A gradient as it was when it was read, and its place in the statistics."""

    gradient: weakref.ref[Tensor]
    version: int
    stats: GradStats
    place: int


class Overlap:
    """Statistics of the gradients that the backward has written so far.

    A gradient that was written, reduced or replaced after it was read is read again before the step. So is
    one whose hook did not run.
    """

    def __init__(self) -> None:
        self._hooked: dict[int, RemovableHandle] = {}
        self._pending: dict[int, weakref.ref[Tensor]] = {}  # on one device
        self._device: torch.device | None = None
        self._bytes = 0
        self._reads: dict[int, _Read] = {}
        self._orders: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}
        self._lock = new_lock()  # several threads may run backward passes

    def _watch(self, params: Sequence[Tensor]) -> None:
        """From now on, read the gradients of `params` during each backward."""
        see_list_writes()
        for param in params:
            if id(param) not in self._hooked and param.requires_grad:
                self._hooked[id(param)] = self._hook(param)

    def _hook(self, param: Tensor) -> RemovableHandle:
        owner = weakref.ref(self)

        def written(param: Tensor) -> None:
            overlap = owner()
            if overlap is not None:
                with overlap._lock:
                    overlap._written(param)

        never_compile(written)
        # The parameter owns its hook. A weak reference to itself would forbid torch.utils.swap_tensors.
        weakref.finalize(written, _forget, id(param), self._hooked, self._reads)
        handle: RemovableHandle = param.register_post_accumulate_grad_hook(written)  # type: ignore[no-untyped-call]
        return handle

    def _written(self, param: Tensor) -> None:
        grad = param.grad
        if type(grad) is not Tensor or grad.is_sparse:
            return
        if grad.device != self._device:
            self._read_pending()
            self._device = grad.device
        self._pending[id(param)] = weakref.ref(grad)
        self._bytes += grad.numel() * grad.element_size()
        if self._bytes >= _bucket_nbytes(grad.device):
            self._read_pending()

    def _read_pending(self) -> None:
        pending, self._pending, self._bytes = self._pending, {}, 0
        alive = {key: grad for key, ref in pending.items() if (grad := ref()) is not None}
        if alive:
            self._read(list(alive), list(alive.values()))

    def _read(self, keys: Sequence[int], grads: Sequence[Tensor]) -> None:
        versions = [*map(version_of, grads)]  # first: another thread's backward may write to them
        device = grads[0].device
        stats = read_once(kernels_of(device), grads, 2.0, device)
        for place, (key, grad, version) in enumerate(zip(keys, grads, versions, strict=True)):
            self._reads[key] = _Read(weakref.ref(grad), version, stats, place)

    def grad_stats(self, part: Gradients, norm_type: float) -> GradStats:
        """Return the same as `Gradients.grad_stats`, but read only what changed since it was last read."""
        if norm_type != 2.0 or part.sharding is not WHOLE:
            return part.grad_stats(norm_type)
        self._watch(part.params)
        keys = [id(p) for p in part.params]
        late = [i for i, key in enumerate(keys) if not self._is_read(key, part.grads[i])]
        for key in keys:
            self._pending.pop(key, None)  # they count as late
        if not self._pending:
            self._bytes = 0
        if len(late) == len(keys):
            return part.grad_stats(norm_type)
        if late:
            self._read([keys[i] for i in late], [part.grads[i] for i in late])
        return self._joined([self._reads.pop(key) for key in keys])

    def _joined(self, reads: Sequence[_Read]) -> GradStats:
        """Join the statistics of the buckets, in the order of the gradients."""
        buckets = {id(read.stats): read.stats for read in reads}
        starts, start = {}, 0
        for key, stats in buckets.items():
            starts[key] = start
            start += stats.norms.numel()
        places = tuple([starts[id(read.stats)] + read.place for read in reads])
        order = self._on_device(places, reads[0].stats.norm.device)
        norms = torch.cat([stats.norms for stats in buckets.values()])[order]
        bad = torch.cat([stats.nonfinite for stats in buckets.values()])[order]
        return GradStats(_norm(norms), norms, bad, bad.amax())

    def _on_device(self, order: tuple[int, ...], device: torch.device) -> Tensor:
        """Return `order` on `device`, cached: copying it there makes the host wait."""
        known = self._orders.get((device, order))
        if known is None:
            if len(self._orders) >= _ORDERS:
                self._orders.clear()
            known = self._orders[device, order] = torch.tensor(order, device=device)
        return known

    def _is_read(self, key: int, gradient: Tensor) -> bool:
        read = self._reads.get(key)
        return read is not None and read.gradient() is gradient and read.version == version_of(gradient)

    def __getstate__(self) -> dict[str, Any]:
        # Hooks and gradients belong to this process. Pickle's protocols 0 and 1 restore no empty state.
        return {"_hooked": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Overlap.__init__(self)


def _forget(key: int, *known: dict[int, Any]) -> None:
    """Forget what is `known` of a parameter that is gone."""
    for each in known:
        each.pop(key, None)


def _bucket_nbytes(device: torch.device) -> int:
    return get_backend(device.type).grad_bucket_nbytes


def _norm(norms: Tensor) -> Tensor:
    wide = norms.double() if get_backend(norms.device.type).has_float64 else norms
    total: Tensor = torch.linalg.vector_norm(wide)
    return total.to(norms.dtype)
