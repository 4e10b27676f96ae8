"""Check and convert arguments that several public functions share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_module(value: object, function: str) -> None:
    """Raise TypeError unless `value` is a module, which `function` needs."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{function}() needs a torch.nn.Module, not {named(value)}.")


def check_optimizer(value: object, function: str) -> None:
    """Raise TypeError unless `value` is an optimizer, or wraps one as trainers do."""
    if isinstance(value, type) or not hasattr(value, "param_groups"):
        raise TypeError(f"{function}() needs a torch.optim.Optimizer, not {named(value)}.")


def check_scaler(value: object, function: str) -> None:
    """Raise TypeError unless `value` is amp-core's scaler, whose steps can be followed."""
    if isinstance(value, type) or not hasattr(value, "register_step_hook"):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(f"{function}() needs an amp_core.GradScaler, not {kind}.")


def as_number(value: Any, name: str) -> Any:
    """Return `value` as torch's clipping takes it: as a float, or as a 0-dim tensor.

    Raises:
        TypeError: it is no number.
        ValueError: it is NaN.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TypeError(f"{name}= must be a number, not a tensor of {value.numel()} elements.")
    if is_no_real(value):
        raise TypeError(f"{name}= must be a number, not {value!r}.")
    if not isinstance(value, (float, Tensor)):
        try:
            value = float(value)
        except OverflowError:  # an int beyond floats
            value = math.inf if value > 0 else -math.inf
        except (TypeError, ValueError):
            raise TypeError(f"{name}= must be a number, not {value!r}.") from None
    if isinstance(value, Tensor):
        return value.reshape(())
    if math.isnan(value):
        raise ValueError(f"{name}= is NaN, so no gradient would be clipped. Pass a number.")
    return value


def as_max_norm(value: Any) -> Any:
    """Return `value` as the largest norm.

    Raises:
        TypeError: it is no number.
        ValueError: it is NaN or negative.
    """
    norm = as_number(value, "max_norm")
    if not isinstance(norm, Tensor) and norm < 0:
        raise ValueError(
            f"max_norm= must be at least 0, not {norm}: clipping would turn the gradients around."
        )
    return norm


def check_real(value: object, name: str) -> None:
    """Raise TypeError unless `value` is a real number, or a tensor of one."""
    is_one = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    if not is_one or is_no_real(value):
        raise TypeError(f"{name}= must be a number, not {value!r}.")


def as_order(value: Any) -> Any:
    """Return the order of a norm.

    Raises:
        TypeError: it is no number.
        ValueError: it is not positive.
    """
    order = as_number(value, "norm_type")
    if not order > 0:
        raise ValueError(
            f"norm_type= must be above 0, not {order}: for such an order, torch computes what is not a norm, "
            f"so it cannot be unscaled. Pass 2.0, or inf for the largest element."
        )
    return order


def as_whole(value: object, name: str, least: int | None = None) -> int:
    """Return `value` as an int; raise TypeError or ValueError unless it is an integer of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name}= must be an integer, not {value!r}.")
    if least is not None and value < least:
        raise ValueError(f"{name}= must be at least {least}, not {value}.")
    return int(value)


def check_dtype(value: object, name: str) -> None:
    """Raise TypeError unless `value` is a dtype."""
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name}= must be a torch.dtype, not {value!r}.")


def is_count(value: object) -> bool:
    """Whether `value` is an int above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def named_tensors(pairs: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield `pairs` of a name and a parameter.

    Raises:
        TypeError: `pairs` is or holds something else.
    """
    is_several = isinstance(pairs, Iterable) and not isinstance(pairs, (nn.Module, Tensor, str))
    for pair in pairs if is_several else [pairs]:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            raise TypeError(
                f"Names of parameters must be pairs, as model.named_parameters() returns them, not "
                f"{named(pair)}."
            )
        yield pair[0], pair[1]


def check_group(process_group: object, name: str = "process_group") -> ProcessGroup:
    """Return `process_group` if this rank can use it.

    Raises:
        TypeError: it is not a process group, or this rank is not a member of it.
    """
    from torch import distributed

    if distributed.is_available() and isinstance(process_group, distributed.ProcessGroup):
        return process_group
    raise TypeError(
        f"{name} must be a torch.distributed.ProcessGroup that this rank is a member of, got "
        f"{process_group!r}. On ranks that are not members, torch.distributed.new_group returns a number "
        f"instead of a group; pass no group there."
    )


def device_type_of(device: str | torch.device | Tensor) -> str:
    """Return the device type that `device` refers to.

    Args:
        device: a device type (``"cuda"``), a device string (``"cuda:1"``: the index is ignored, as in
            torch), a ``torch.device``, a tensor (its device), or ``"auto"`` (the accelerator that is
            present, else ``"cpu"``).

    Raises:
        ValueError: with torch's text, for anything else.
    """
    if type(device) is str and device != "auto":  # the fast path: every region calls this
        return device.partition(":")[0]
    if isinstance(device, Tensor):
        return device.device.type
    if isinstance(device, torch.device):
        return device.type
    if not isinstance(device, str):
        raise ValueError(f"Expected `device_type` of type `str`, got: `{type(device)}`")
    if device != "auto":  # a subclass of str, such as an enum
        return str.partition(device, ":")[0]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def home_of(weight: Tensor) -> str:
    """Return the type of the device that computes with `weight`; from "meta", weights go to a device."""
    return device_type_of("auto" if weight.is_meta else weight)


def is_no_real(value: object) -> bool:
    """Whether `value` is a truth value or complex: `float` takes those of torch and NumPy for numbers."""
    if isinstance(value, Tensor):
        return value.dtype is torch.bool or value.is_complex()
    of_numpy = getattr(getattr(value, "dtype", None), "kind", None)
    return isinstance(value, bool) or of_numpy in ("b", "c")


def named(value: object) -> str:
    """Return what `value` is, for a message: its type, or the name of the class that it is itself."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def is_of_another_copy(value: object, cls: type) -> bool:
    """Return whether `value` would be a `cls`, had amp-core not been imported anew since it was made."""
    return any(
        each is not cls and (each.__module__, each.__qualname__) == (cls.__module__, cls.__qualname__)
        for each in type(value).__mro__
    )


ANOTHER_COPY = "an amp_core that was imported before this one. Make it anew, or restart Python"
"""The end of an error about such a value."""
