"""The private torch names for steps and kernels: fused optimizers, lists of tensors, their layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from amp_core._torch.features import Feature

_FUSED = Feature(
    "fused_steps",
    "GradScaler unscales gradients before a fused optimizer steps, and waits for the device, which is slower",
    probed=("Optimizer._step_supports_amp_scaling",),
)


@_FUSED.probe
def _check_fused() -> None:
    if not takes_scale(torch.optim.SGD([torch.ones(1, device="cpu")], lr=0.0, fused=True)):
        raise RuntimeError("fused optimizers do not say that they take grad_scale and found_inf")


def takes_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` says that its step takes ``grad_scale`` and ``found_inf``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` takes ``grad_scale`` and ``found_inf``; warns if torch's no longer say so."""
    if takes_scale(optimizer):
        return True
    defaults = getattr(optimizer, "defaults", None)  # of another class, it may be anything
    if isinstance(defaults, dict) and defaults.get("fused"):
        _FUSED.works_or_warn()
    return False


_FOREACH = Feature("foreach", "the portable kernels handle tensors one by one, which is slower")


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _multiply_each(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def _norm_of_each(
    tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def _divide_each(tensors: Sequence[torch.Tensor], by: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor / divisor for tensor, divisor in zip(tensors, by, strict=True)]


def _one() -> torch.Tensor:
    return torch.ones((), device="cpu")


foreach_copy_ = _FOREACH.function("torch._foreach_copy_", _copy_each, lambda f: f([_one()], [_one()]))
foreach_div = _FOREACH.function("torch._foreach_div", _divide_each, lambda f: f([_one()], [_one()]))
foreach_mul_ = _FOREACH.function("torch._foreach_mul_", _multiply_each, lambda f: f([_one()], _one()))
foreach_norm = _FOREACH.function(
    "torch._foreach_norm", _norm_of_each, lambda f: f([_one()], 2.0, dtype=torch.float64)
)


def _unscale_each(tensors: Sequence[torch.Tensor], found_inf: torch.Tensor, factor: torch.Tensor) -> None:
    for tensor in tensors:
        found_inf.masked_fill_(tensor.isfinite().all().logical_not(), 1.0)
        tensor.mul_(factor)


# torch's own pass over gradients; it checks what it reads, not the products.
unscale_ = Feature(
    "unscale", "the CPU's kernels handle a few small gradients one by one, which is slower"
).function(
    "torch._amp_foreach_non_finite_check_and_unscale_",
    _unscale_each,
    lambda f: f([_one()], _one().float(), _one().float()),
)

# The memory of a lazily negated tensor, without a copy.
neg_view = Feature("negated_gradients", "a GradScaler refuses gradients that are lazily negated").function(
    "torch._neg_view"
)

# Whether two tensors have one memory; without it, the portable kernels write back what they need not.
is_alias_of: Callable[[torch.Tensor, torch.Tensor], bool] = Feature(
    "alias", "the portable kernels copy complex gradients once more"
).function("torch._C._is_alias_of", lambda *_: False, lambda f: f(_one(), _one()))

_LAYOUT = Feature("gradient_layout", "GradScaler inspects every gradient in every step, which is slower")
_tensor_guards = _LAYOUT.value("torch._C._dynamo.guards.TensorGuards", None)


@_LAYOUT.probe
def _check_layout() -> None:
    same = _layout_guard([torch.ones(2)])
    if [same(torch.ones(2)), same(torch.ones(3)), same(torch.ones(2).half())] != [True, False, False]:
        raise RuntimeError("it does not tell tensors apart by shape and dtype")


def same_layout(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a guard that checks that tensors match these.

    They match if, in this order, they have the same class, dispatch keys (so neither sparse nor a lazy
    negative where these are not), dtype, device, shape and strides. The guard holds no reference to them.
    It is 20 times as fast as inspecting each gradient in every step.
    """
    return _layout_guard(tensors) if _LAYOUT.works_or_warn() else lambda *_: False


def _layout_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    sizes = [list(t.size()) for t in tensors]
    strides = [list(t.stride()) for t in tensors]
    guards = _tensor_guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return cast("Callable[..., bool]", guards.check)
