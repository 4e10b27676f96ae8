"""The gradients of one optimizer, ready for the kernels of the devices that they are on."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from amp_core._torch import internals as _torch
from amp_core._torch.internals import is_dtensor
from amp_core.kernels import PORTABLE, GradStats, Kernels
from amp_core.plugin.default_manager import get_backend
from amp_core.scaling.arithmetic import any_of, is_tracing
from amp_core.scaling.distributed import agree, ranks_of, shards_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from amp_core.scaling.overlap import Overlap


def kernels_of(device: torch.device) -> Kernels:
    """Return the kernels of the device's backend; to Dynamo the portable ones, into which it sees."""
    return PORTABLE if is_tracing() else get_backend(device.type).kernels()


class Gradients(NamedTuple):
    """Gradients on one device, each with its parameter; sparse ones as their values.

    Attributes:
        device: where they are.
        params: the parameters, each once however many groups name it.
        grads: for each parameter what the kernels read and write.
        kernels: the device's.
        shards: into how many pieces they are cut, of which these are one; 1 if they are no DTensors.
        mesh: the ranks that hold them; None if they are no DTensors.
    """

    device: torch.device
    params: list[Tensor]
    grads: Sequence[Tensor]
    kernels: Kernels
    shards: int = 1
    mesh: DeviceMesh | None = None

    def grad_stats(self, norm_type: float) -> GradStats:
        """Read the gradients once: norms and which are not finite."""
        return self.kernels.grad_stats(self.grads, norm_type)

    def multiply_(self, factor: Tensor, found_inf: Tensor | None) -> None:
        """Multiply the gradients; raise `found_inf` to 1 where one is not finite before or after."""
        self.kernels.multiply_(self.grads, factor, found_inf)


class Look(NamedTuple):
    """What one read of all gradients of an optimizer gives.

    Attributes:
        measured: for each of the parts that were given.
        norm: 0-dim, of all gradients, as they are now.
        flags: one a device, 1.0 if a gradient is not finite, else 0.0.
        agreed: whether norm and flags are those of all ranks, of which each holds a part.
    """

    measured: list[GradStats]
    norm: Tensor
    flags: dict[torch.device, Tensor]
    agreed: bool = False


def look(
    parts: Sequence[Gradients],
    norm_type: float,
    device: torch.device,
    process_group: ProcessGroup | None,
    overlap: Overlap | None,
) -> Look:
    """Read the gradients once, unless the backward has; where ranks share them, agree on norm and flags."""
    if overlap is None or is_tracing():
        measured = [part.grad_stats(norm_type) for part in parts]
    else:
        measured = [overlap.grad_stats(part, norm_type) for part in parts]
    ranks = ranks_of(parts, process_group)
    if ranks is None:
        found = [(p.device, m.found_inf) for p, m in zip(parts, measured, strict=True)]
        return Look(measured, total_norm(measured, norm_type, device), by_device(found))
    norm, flag = agree(parts, measured, norm_type, ranks, device)
    return Look(measured, norm, {device: flag}, agreed=True)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, one after the other."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def gather(optimizer: torch.optim.Optimizer, *, allow_fp16: bool) -> list[Gradients]:
    """Return what `optimizer` is to step on, by device.

    Uncoalesced sparse gradients are coalesced in place of ``.grad`` first: their duplicates add up
    to what the optimizer uses.

    Raises:
        AssertionError: a parameter is no tensor; torch's text.
        ValueError: a gradient is float16 and `allow_fp16` is not set; begins with torch's text.
    """
    held = parameters_of(optimizer)
    last = None if is_tracing() else _last_seen.get(optimizer)
    again = last.again(held, allow_fp16) if last is not None else None
    if again is not None:
        return [again]
    unique = {id(p): p for p in held}.values()
    for kind in set(map(type, unique)):
        if not issubclass(kind, Tensor):
            raise AssertionError(f"expected param to be torch.Tensor, got {kind.__name__}")
    params = [p for p in unique if p.grad is not None]
    grads = [cast(Tensor, p.grad) for p in params]
    if not allow_fp16 and torch.float16 in {g.dtype for g in grads}:
        raise ValueError(_fp16_refused(optimizer))
    parts = _by_place(params, grads)
    dense = len(parts) == 1 and all(map(operator.is_, parts[0].grads, grads))
    if dense and {Tensor}.issuperset(map(type, grads)) and not is_tracing():
        _last_seen[optimizer] = _Seen(held, params, grads)
    return parts


class _Seen:
    """What was found out about the gradients of one optimizer, which are mostly such again at the next step.

    Refers to neither parameters nor gradients, which belong to others.
    """

    def __init__(self, held: list[Tensor], params: list[Tensor], grads: list[Tensor]) -> None:
        place = {id(p): i for i, p in enumerate(held)}
        self._held = list(map(id, held))
        self._with_gradient = [place[id(p)] for p in params]
        self._without = sorted(set(place.values()) - set(self._with_gradient))
        self._all = self._with_gradient == list(range(len(held)))
        self._alike = _torch.same_layout(grads)
        self._float16 = torch.float16 in {g.dtype for g in grads}
        self._device = grads[0].device
        self._kernels = kernels_of(self._device)
        self._layout = self._kernels.layout(grads)

    def again(self, held: list[Tensor], allow_fp16: bool) -> Gradients | None:
        """Return the gradients of `held`, if all is as it was; else None."""
        if list(map(id, held)) != self._held or (self._float16 and not allow_fp16):
            return None
        params = held if self._all else [held[i] for i in self._with_gradient]
        grads = [p.grad for p in params]
        if not self._alike(*grads) or any([held[i].grad is not None for i in self._without]):  # noqa: C419
            return None
        if self._kernels is not kernels_of(self._device):
            return None
        ready = self._kernels.prepare(cast("list[Tensor]", grads), self._layout)
        return Gradients(self._device, params, ready, self._kernels)


_last_seen: WeakKeyDictionary[torch.optim.Optimizer, _Seen] = WeakKeyDictionary()


def _by_place(params: list[Tensor], grads: list[Tensor]) -> list[Gradients]:
    places: dict[tuple[torch.device, int, DeviceMesh | None], tuple[list[Tensor], list[Tensor]]] = {}
    for param, grad in zip(params, grads, strict=True):
        dense = _values(param) if grad.is_sparse else grad
        shards, mesh = (shards_of(dense), cast(Any, dense).device_mesh) if is_dtensor(dense) else (1, None)
        held = places.setdefault((dense.device, shards, mesh), ([], []))
        held[0].append(param)
        held[1].append(dense if mesh is None else _piece(dense))
    parts = []
    for (device, shards, mesh), (of, pieces) in places.items():
        kernels = kernels_of(device)
        parts.append(Gradients(device, of, kernels.prepare(pieces), kernels, shards, mesh))
    return parts


def _piece(gradient: Any) -> Tensor:
    """Return the memory that this rank has of a DTensor."""
    with torch.no_grad():
        return cast(Tensor, gradient.to_local())


def _fp16_refused(optimizer: torch.optim.Optimizer) -> str:
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param.grad is not None and param.grad.dtype is torch.float16:
                return _FP16.format(shape=tuple(param.shape), index=index)
    raise AssertionError("no gradient is float16")


_FP16 = (
    "Attempting to unscale FP16 gradients. The first is that of a parameter of shape {shape} in parameter "
    "group {index}. Keep the parameters in float32 and let autocast make the float16 casts, or pass "
    "allow_fp16_gradients=True to the GradScaler."
)


def _values(param: Tensor) -> Tensor:
    grad = param.grad
    assert grad is not None
    if not grad.is_coalesced():
        grad = param.grad = grad.coalesce()
    return grad._values()


def total_norm(parts: Sequence[GradStats], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm over all devices, on `device`."""
    if not parts:
        return torch.zeros((), device=device)
    if len(parts) == 1:
        return parts[0].norm.to(device, non_blocking=True)
    norms = torch.stack([p.norm.to(device, non_blocking=True) for p in parts])
    total: Tensor = torch.linalg.vector_norm(norms, math.inf if math.isinf(norm_type) else norm_type)
    return total


def by_device(found: Sequence[tuple[torch.device, Tensor]]) -> dict[torch.device, Tensor]:
    """Return one flag a device: 1.0 if any of its flags is, else 0.0."""
    flags: dict[torch.device, list[Tensor]] = defaultdict(list)
    for device, flag in found:
        flags[device].append(flag)
    return {device: any_of(held) for device, held in flags.items()}
