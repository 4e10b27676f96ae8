"""The private torch names for the tensors that ``torch.func`` puts for a program's own, and for numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from amp_core._torch.features import Feature
from amp_core.common.once import once

_TENSORS = Feature(
    "transformed_tensors",
    "once a policy has had a rule for an op such as mul, torch.func.grad fails in regions where that op gets "
    "a number, and compare and advise do not put back what is written to weights that torch.func wraps",
)
_is_wrapped = _TENSORS.function("torch._C._functorch.is_functorch_wrapped_tensor", lambda _tensor: False)
_unwrapped = _TENSORS.function("torch._C._functorch.get_unwrapped", lambda tensor: tensor)
_is_zero = _TENSORS.function("torch.Tensor._is_zerotensor")
# A context in which ``torch.func`` transforms nothing.
outside_transforms: Callable[[], AbstractContextManager[Any]] = _TENSORS.function(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", nullcontext
)


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the program's own tensor, for which transforms of ``torch.func`` may have put `tensor`."""
    if _TENSORS.works():
        while _is_wrapped(tensor):
            tensor = _unwrapped(tensor)
    return tensor


_NAME = "_wrapped_number"


def _number(tensor: Tensor) -> Any:
    if _NAME in tensor.__dict__:
        return tensor.__dict__[_NAME]
    if not _is_wrapped(tensor):
        raise AttributeError(_NAME)
    tensor = unwrapped(tensor)
    if _is_zero(tensor):  # the tangent of a number, which has no memory either
        return 0.0 if tensor.is_floating_point() else 0
    return tensor.tolist()  # no torch operation, so no mode sees it


def _store(tensor: Tensor, number: Any) -> None:
    tensor.__dict__[_NAME] = number  # as the dispatcher does with a size that is not known yet


@once
def show_numbers() -> None:
    """From now on, let Python kernels get the numbers in calls that ``torch.func`` transforms.

    A number, such as the 2 of ``x * 2``, reaches the dispatcher as a tensor. A Python kernel gets its
    attribute ``_wrapped_number``, or else what its memory holds, and tensors of ``torch.func`` have none.
    """
    if _TENSORS.works():
        Tensor._wrapped_number = property(_number, _store)  # type: ignore[attr-defined]
