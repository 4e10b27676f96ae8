"""The gradients of one optimizer, ready for the kernels of the devices that they are on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from amp_core import _torch
from amp_core.kernels import Measurement
from amp_core.plugin.manager import get_backend


class Gradients(NamedTuple):
    """Gradients on one device, each with its parameter; sparse ones as their values.

    Attributes:
        device: where they are.
        params: the parameters, each once however many groups name it.
        grads: for each parameter what the kernels read and write.
        sharded: they are DTensors; kernels of raw memory do not apply.
    """

    device: torch.device
    params: list[Tensor]
    grads: Sequence[Tensor]
    sharded: bool

    def measure(self, norm_type: float) -> Measurement:
        """Read the gradients once: norms and which are not finite."""
        if self.sharded:
            return _measure_sharded(self.grads, norm_type)
        return get_backend(self.device.type).kernels().measure(self.grads, norm_type)

    def scale_(self, factor: Tensor, found_inf: Tensor | None) -> None:
        """Multiply the gradients; raise `found_inf` to 1 where one is not finite before or after."""
        if self.sharded:
            _torch.unscale_and_check(
                self.grads, _flag(self.device) if found_inf is None else found_inf, factor
            )
        else:
            get_backend(self.device.type).kernels().scale_(self.grads, factor, found_inf)


def gather(optimizer: torch.optim.Optimizer, *, allow_fp16: bool) -> list[Gradients]:
    """Return what `optimizer` is to step on, by device.

    Uncoalesced sparse gradients are coalesced in place of ``.grad`` first: their duplicates add up
    to what the optimizer uses.

    Raises:
        AssertionError: a parameter is no tensor; torch's text.
        ValueError: a gradient is float16 and `allow_fp16` is not set; begins with torch's text.
    """
    unique = {id(p): p for group in optimizer.param_groups for p in group["params"]}.values()
    for kind in set(map(type, unique)):
        if not issubclass(kind, Tensor):
            raise AssertionError(f"expected param to be torch.Tensor, got {kind.__name__}")
    params = [p for p in unique if p.grad is not None]
    grads = [cast(Tensor, p.grad) for p in params]
    if not allow_fp16 and torch.float16 in {g.dtype for g in grads}:
        raise ValueError(_fp16_refused(optimizer))
    if {Tensor}.issuperset(map(type, grads)) and not any([g.is_sparse for g in grads]):  # noqa: C419
        devices = {g.device for g in grads}
        if len(devices) == 1:  # the common case, and with many small gradients the loop below takes long
            return [_prepared(devices.pop(), params, grads)]
    return _by_place(params, grads)


def _by_place(params: list[Tensor], grads: list[Tensor]) -> list[Gradients]:
    places: dict[tuple[torch.device, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for param, grad in zip(params, grads, strict=True):
        dense = _values(param) if grad.is_sparse else grad
        held = places.setdefault((dense.device, _torch.is_dtensor(dense)), ([], []))
        held[0].append(param)
        held[1].append(dense)
    return [
        Gradients(device, *held, sharded) if sharded else _prepared(device, *held)
        for (device, sharded), held in places.items()
    ]


def _prepared(device: torch.device, params: list[Tensor], grads: list[Tensor]) -> Gradients:
    return Gradients(device, params, get_backend(device.type).kernels().prepare(grads), False)


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


def _measure_sharded(grads: Sequence[Tensor], norm_type: float) -> Measurement:
    flag = _flag(grads[0].device)
    _torch.unscale_and_check(grads, flag, torch.ones_like(flag))
    total = torch.nn.utils.get_total_norm(grads, norm_type)
    full = total.full_tensor() if _torch.is_dtensor(total) else total  # type: ignore[attr-defined]
    none = torch.zeros(len(grads), device=flag.device)
    return Measurement(full, none, none, flag)


def _flag(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=device)


def total_norm(parts: Sequence[Measurement], norm_type: float, device: torch.device) -> Tensor:
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
    return {d: f[0] if len(f) == 1 else torch.stack(f).amax(0) for d, f in flags.items()}
