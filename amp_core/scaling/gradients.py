"""The gradients of one optimizer, grouped for the kernels of their devices."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from amp_core._torch.steps import same_layout
from amp_core._torch.tensors import is_dtensor, part_of, summed
from amp_core.common.identity import WeakIdentityMapping
from amp_core.common.optimizers import parameters_of
from amp_core.common.text import counted
from amp_core.kernels import PORTABLE, GradStats, Kernels
from amp_core.plugin.default_manager import get_backend
from amp_core.plugin.results import wrong_kernel
from amp_core.scaling.arithmetic import is_tracing
from amp_core.scaling.distributed import WHOLE, Sharding, describe, shardings_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def kernels_of(device: torch.device) -> Kernels:
    """Return the kernels of the device's backend; while Dynamo traces, the portable ones."""
    return PORTABLE if is_tracing() else get_backend(device.type).kernels()


def read_once(kernels: Kernels, grads: Sequence[Tensor], norm_type: float, device: torch.device) -> GradStats:
    """Return what `kernels` find in `grads`.

    Raises:
        BackendError: they return something else than the statistics of these gradients.
    """
    stats, count = kernels.grad_stats(grads, norm_type), len(grads)
    if not isinstance(stats, GradStats) or not _are_of(stats, count):
        expected = f"a GradStats of tensors: `norms` and `nonfinite` of shape ({count},), the others 0-dim"
        raise wrong_kernel(kernels, "grad_stats", device.type, stats, expected)
    return stats


def _are_of(stats: GradStats, count: int) -> bool:
    for value in (stats.norm, stats.norms, stats.nonfinite, stats.found_inf):
        if not isinstance(value, Tensor):
            return False
    return stats.norms.numel() == stats.nonfinite.numel() == count


class Gradients(NamedTuple):
    """Gradients of one device and sharding, each with its parameter.

    Attributes:
        device: their device.
        params: the parameters, without duplicates.
        grads: for each parameter, the tensor that the kernels read and write: the values of a sparse
            gradient, this rank's piece of a DTensor.
        kernels: the kernels of the device.
        sharding: how the gradients are spread over ranks.
    """

    device: torch.device
    params: list[Tensor]
    grads: Sequence[Tensor]
    kernels: Kernels
    sharding: Sharding = WHOLE

    def grad_stats(self, norm_type: float) -> GradStats:
        """Read the gradients once: norms, and which are not finite."""
        return read_once(self.kernels, self.grads, norm_type, self.device)

    def multiply_(self, factor: Tensor, found_inf: Tensor | None) -> None:
        """Multiply the gradients; set `found_inf` to 1 if one is not finite before or after."""
        self.kernels.multiply_(self.grads, factor, found_inf)


def group_by_device(optimizer: torch.optim.Optimizer, *, allow_fp16: bool) -> list[Gradients]:
    """Return the gradients of `optimizer`, grouped by device and sharding.

    Uncoalesced sparse gradients are first replaced by coalesced ones, and DTensors of which each rank has a
    summand by their sum: the optimizer uses the sum.

    Raises:
        AssertionError: a parameter is not a tensor; torch's text.
        RuntimeError: elements of a gradient share memory; begins with torch's text.
        ValueError: a gradient is float16 and `allow_fp16` is not set; begins with torch's text.
    """
    all_params = parameters_of(optimizer)
    if is_tracing():
        return _group(optimizer, all_params, allow_fp16)[0]
    known = _groupings.get(optimizer)
    again = None if known is None else known.again(all_params, allow_fp16)
    if again is not None:
        return [again]
    parts, params, grads = _group(optimizer, all_params, allow_fp16)
    if _is_simple(parts, grads):
        _groupings[optimizer] = _Grouping(all_params, params, grads)
    return parts


def describe_sharding(
    sharded_over: Mapping[Any, Iterable[Tensor]], process_group: ProcessGroup | None
) -> None:
    """Note how parameters are sharded; see `describe`. Groupings that do not know it are forgotten."""
    describe(sharded_over, process_group)
    _groupings.clear()


def joined(groups: Sequence[list[Gradients]]) -> list[Gradients]:
    """Return the gradients of several optimizers as one list.

    Raises:
        ValueError: two of the optimizers have a parameter in common.
    """
    if len(groups) == 1:
        return groups[0]
    parts = [part for group in groups for part in group]
    params = [param for part in parts for param in part.params]
    if len({id(param) for param in params}) < len(params):
        raise ValueError(IN_COMMON)
    return parts


IN_COMMON = (
    "Two of these optimizers have a parameter in common, or one was passed twice: its gradient would be "
    "unscaled twice."
)


def _group(
    optimizer: torch.optim.Optimizer, all_params: list[Tensor], allow_fp16: bool
) -> tuple[list[Gradients], list[Tensor], list[Tensor]]:
    unique = {id(p): p for p in all_params}.values()
    for kind in set(map(type, unique)):
        if not issubclass(kind, Tensor):
            raise AssertionError(f"expected param to be torch.Tensor, got {kind.__name__}")
    params = [p for p in unique if p.grad is not None]
    grads = [cast(Tensor, p.grad) for p in params]
    if not allow_fp16 and torch.float16 in {g.dtype for g in grads}:
        raise ValueError(_fp16_refused(optimizer))
    if any(map(_overlaps, grads)):
        raise RuntimeError(_OVERLAP)
    return _by_place(params, grads), params, grads


def _is_simple(parts: list[Gradients], grads: list[Tensor]) -> bool:
    """Whether all gradients are dense and whole, on one device and of no subclass."""
    if len(parts) != 1 or parts[0].sharding is not WHOLE:
        return False
    dense = all(map(operator.is_, parts[0].grads, grads))
    return dense and {Tensor}.issuperset(map(type, grads))


class _Grouping:
    """A grouping that is reused while gradients of the same kind come back in the next step.

    It refers to neither parameters nor gradients.
    """

    def __init__(self, all_params: list[Tensor], params: list[Tensor], grads: list[Tensor]) -> None:
        place = {id(p): i for i, p in enumerate(all_params)}
        self._ids = list(map(id, all_params))
        self._with_gradient = [place[id(p)] for p in params]
        self._without = sorted(set(place.values()) - set(self._with_gradient))
        self._all = self._with_gradient == list(range(len(all_params)))
        self._same_layout = same_layout(grads)
        self._float16 = torch.float16 in {g.dtype for g in grads}
        self._device = grads[0].device
        self._device_type = self._device.type
        self._kernels = kernels_of(self._device)
        self._layout = self._kernels.layout(grads)

    def again(self, all_params: list[Tensor], allow_fp16: bool) -> Gradients | None:
        """Return the gradients of `all_params` if nothing but values and addresses changed, else None."""
        if list(map(id, all_params)) != self._ids or (self._float16 and not allow_fp16):
            return None
        params = all_params if self._all else [all_params[i] for i in self._with_gradient]
        grads: list[Any] = [p.grad for p in params]
        if not self._same_layout(*grads):
            return None
        if self._without and any([all_params[i].grad is not None for i in self._without]):
            return None
        if self._kernels is not get_backend(self._device_type).kernels():
            return None
        ready = _prepared(self._kernels, grads, self._device, self._layout)
        return Gradients(self._device, params, ready, self._kernels)


_groupings: MutableMapping[torch.optim.Optimizer, _Grouping] = WeakIdentityMapping()


def _by_place(params: list[Tensor], grads: list[Tensor]) -> list[Gradients]:
    places: dict[tuple[torch.device, Sharding], tuple[list[Tensor], list[Tensor]]] = {}
    all_dense = [_known(p, grad) for p, grad in zip(params, grads, strict=True)]
    for param, dense, sharding in zip(params, all_dense, shardings_of(params, all_dense), strict=True):
        owners, pieces = places.setdefault((dense.device, sharding), ([], []))
        owners.append(param)
        pieces.append(dense if sharding.mesh is None else part_of(dense))
    parts = []
    for (device, sharding), (owners, pieces) in places.items():
        kernels = kernels_of(device)
        parts.append(Gradients(device, owners, _prepared(kernels, pieces, device), kernels, sharding))
    return parts


def _prepared(
    kernels: Kernels, grads: list[Tensor], device: torch.device, layout: object = None
) -> Sequence[Tensor]:
    ready = kernels.prepare(grads, layout)
    if ready is None or len(ready) != len(grads):
        raise wrong_kernel(kernels, "prepare", device.type, ready, counted(len(grads), "tensor"))
    return ready


def _known(param: Tensor, grad: Tensor) -> Tensor:
    """Return the elements of the gradient; where it has summands of them, it gets their sums first."""
    if grad.is_sparse:
        if not grad.is_coalesced():
            grad = param.grad = grad.coalesce()
        return grad.detach().values()  # a view
    if is_dtensor(grad):
        whole = summed(grad)
        if whole is not grad:
            grad = param.grad = whole
    return grad


def _overlaps(grad: Tensor) -> bool:
    """Whether elements of a gradient share memory, as expanded ones do: fused kernels read beyond it."""
    return grad.layout is torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(grad.stride(), grad.shape, strict=True)
    )


_OVERLAP = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory "
    "location. Please clone() the tensor before performing the operation. It is the gradient of a parameter."
)


def _fp16_refused(optimizer: torch.optim.Optimizer) -> str:
    of_group = ((index, p) for index, group in enumerate(optimizer.param_groups) for p in group["params"])
    index, param = next((i, p) for i, p in of_group if p.grad is not None and p.grad.dtype is torch.float16)
    return _FP16.format(shape=tuple(param.shape), index=index)


_FP16 = (
    "Attempting to unscale FP16 gradients. The first is that of a parameter of shape {shape} in parameter "
    "group {index}. Keep the parameters in float32 and let autocast cast to float16, or pass "
    "allow_fp16_gradients=True to the GradScaler."
)
