"""Which steps of optimizers write to weights without changing their version counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from amp_core.common.optimizers import StepArguments, is_torchs
from amp_core.kernels.memory import on_host, read


def may_write_unseen(optimizer: Optimizer) -> bool:
    """Return whether the next step of `optimizer` may; fused steps and those of other packages do."""
    return not is_torchs(optimizer) or bool(getattr(optimizer, "defaults", {}).get("fused"))


def is_skipped(optimizer: Optimizer) -> bool:
    """Return whether the host knows, without waiting, that a fused step of torch writes nothing."""
    found_inf = getattr(optimizer, "found_inf", None)
    if not (is_torchs(optimizer) and isinstance(found_inf, Tensor) and on_host(found_inf)):
        return False
    return bool(read(found_inf) == 1.0)  # as torch's kernels ask


def before_closure(call: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments:
    """Return the arguments of a step, with `call` called before each call of the closure among them."""

    def wrapped(closure: Any) -> Any:
        is_other = isinstance(closure, (nn.Module, type))  # such as the model of a second-order optimizer
        return _Closure(call, closure) if callable(closure) and not is_other else closure

    named = {"closure": wrapped(kwargs["closure"])} if "closure" in kwargs else {}
    return (*args[:1], *map(wrapped, args[1:2]), *args[2:]), {**kwargs, **named}


class _Closure:
    """A closure that calls something first; for the rest it is the same object, which may have methods."""

    def __init__(self, call: Callable[[], None], closure: Callable[..., Any]) -> None:
        self._call, self.__wrapped__ = call, closure

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._call()
        return self.__wrapped__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)
