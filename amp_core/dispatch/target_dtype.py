"""Compute the dtype that each rule requires, given the arguments of a call."""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from amp_core._torch.dispatcher import Overload, arguments, dispatcher_name
from amp_core.common.call_site import level_outside
from amp_core.dispatch.work import work
from amp_core.errors import AmpWarning, PolicyError
from amp_core.plugin.default_manager import get_backend
from amp_core.policy import rules as r

Args = Sequence[Any]
Kwargs = dict[str, Any]
TargetDtype = Callable[[Args, Kwargs], "torch.dtype | None"]
"""(positional arguments, keyword arguments) -> the dtype to cast to; None to cast nothing."""


_CAST = {each for each in vars(torch).values() if isinstance(each, torch.dtype) and each.is_floating_point}
_CAST.remove(torch.float64)
_own: dict[str, set[torch.device]] = defaultdict(set)
"""Device type -> the devices of this type so far: reading the type of a device takes as long as all else."""


def eligible(tensor: torch.Tensor, device_type: str) -> bool:
    """Return whether autocast on `device_type` casts `tensor` (``at::autocast::is_eligible``, 2.13)."""
    if tensor.dtype not in _CAST:
        return False
    device = tensor.device
    if device in _own[device_type]:
        return True
    if device.type == device_type:
        _own[device_type].add(device)
        return True
    return device.type in get_backend(device_type).also_casts


def argument_tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors that autocast casts in `values`: an op has them alone, or in a list or tuple."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [item for item in value if isinstance(item, torch.Tensor)]
    return tensors


def _low(_op: Overload, device_type: str) -> TargetDtype:
    return lambda _args, _kwargs: torch.get_autocast_dtype(device_type)


def _fp32(_op: Overload, _device_type: str) -> TargetDtype:
    return lambda _args, _kwargs: torch.float32


def _promote(op: Overload, device_type: str) -> TargetDtype:
    """Torch's ``at::autocast::prioritize``: optional tensors do not count, a third dtype is an error."""
    kinds = [str(a.real_type) in ("Tensor", "List[Tensor]") for a in arguments(op)]
    counted = [index for index, counts in enumerate(kinds) if counts]

    def choose(args: Args, _kwargs: Kwargs) -> torch.dtype:
        low = torch.get_autocast_dtype(device_type)
        target = low
        for tensor in argument_tensors(args[i] for i in counted if i < len(args)):
            if eligible(tensor, device_type):
                target = _wider(target, tensor.dtype, low)
        return target

    return choose


def _wider(current: torch.dtype, other: torch.dtype, low: torch.dtype) -> torch.dtype:
    if current is torch.float64:
        raise RuntimeError("promote type is double in at::autocast::prioritize")
    if torch.float32 in (current, other):
        return torch.float32
    if other is low:
        return low
    raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")


def _promote_types(op: Overload, device_type: str) -> TargetDtype:
    def choose(args: Args, kwargs: Kwargs) -> torch.dtype | None:
        target: torch.dtype | None = None
        for tensor in argument_tensors((*args, *kwargs.values()) if kwargs else args):
            dtype = tensor.dtype
            if dtype is not target and eligible(tensor, device_type):
                target = dtype if target is None else _promoted(op, target, dtype)
        return target

    return choose


_promotion = functools.cache(torch.promote_types)


def _promoted(op: Overload, one: torch.dtype, other: torch.dtype) -> torch.dtype:
    try:
        return _promotion(one, other)
    except RuntimeError as error:
        raise PolicyError(
            f"{dispatcher_name(op)} got {one} and {other}, which torch cannot promote: cast one of them, or "
            f"give the op a rule other than {r.PROMOTE_TYPES!r}."
        ) from error


def _destination(_op: Overload, device_type: str) -> TargetDtype:
    def choose(args: Args, _kwargs: Kwargs) -> torch.dtype | None:
        first = args[0]  # perhaps a number in place of a tensor
        return first.dtype if isinstance(first, torch.Tensor) and eligible(first, device_type) else None

    return choose


def _if_mixed(_op: Overload, device_type: str) -> TargetDtype:
    def choose(args: Args, kwargs: Kwargs) -> torch.dtype | None:
        dtypes = {t.dtype for t in argument_tensors((*args, *kwargs.values())) if eligible(t, device_type)}
        return torch.float32 if len(dtypes) > 1 else None

    return choose


def target_dtype(rule: str, op: Overload, device_type: str) -> TargetDtype:
    """Return the function that computes the dtype for `rule`."""
    limit = r.threshold(rule)
    if limit is None:
        return TARGET_DTYPES[rule](op, device_type)

    def choose(args: Args, kwargs: Kwargs) -> torch.dtype:
        large = work(op, args, kwargs) > limit
        return torch.get_autocast_dtype(device_type) if large else torch.float32

    return choose


_hinted: set[str] = set()


def _with_hint(op: Overload, _device_type: str) -> TargetDtype:
    def choose(_args: Args, _kwargs: Kwargs) -> torch.dtype:
        name = dispatcher_name(op)
        if name not in _hinted:
            _hinted.add(name)
            warnings.warn(_hint(name), AmpWarning, stacklevel=level_outside(("torch",)))
        return torch.float32

    return choose


def _hint(name: str) -> str:
    better = "binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss) is stable in low precision"
    advice = f"; {better}" if name == "aten::binary_cross_entropy" else ""
    return f"{name} runs in float32 under this op policy{advice}."


TARGET_DTYPES: Mapping[str, Callable[[Overload, str], TargetDtype]] = {
    r.LOWER_PRECISION_FP: _low,
    r.FP32: _fp32,
    r.PROMOTE: _promote,
    r.PROMOTE_TYPES: _promote_types,
    r.MATCH_DESTINATION: _destination,
    r.FP32_IF_MIXED: _if_mixed,
    r.FP32_WITH_HINT: _with_hint,
}
"""Maps each rule to a function that builds its `TargetDtype` for an op and a device type."""
