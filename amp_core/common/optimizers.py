"""The parameters of optimizers, and what happens after their steps."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from amp_core.common.containers import map_tensors
from amp_core.common.once import once

StepArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of ``optimizer.step``, of which the first is the optimizer."""


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups in order."""
    groups = [*optimizer.param_groups]  # of another class, they may be any iterable
    if len(groups) == 1:
        return list(groups[0]["params"])
    return [param for group in groups for param in group["params"]]


def is_torchs(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` is one of torch's own."""
    return type(optimizer).__module__.startswith("torch.optim")


def numbered(optimizer: Optimizer, saved: dict[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    """Yield each parameter after its number in `saved`; none if a wrapper saved it in a format of its own."""
    if "param_groups" in saved:
        numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
        yield from zip(numbers, parameters_of(optimizer), strict=True)


def exact_states(optimizer: Optimizer, saved: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield each parameter with a copy of its saved state: torch loads it in the dtype of the parameter."""
    for number, param in numbered(optimizer, saved):
        state = {key: value for key, value in saved["state"].get(number, {}).items() if key != "step"}
        yield param, map_tensors(state, functools.partial(torch.Tensor.to, device=param.device, copy=True))


def copied_group(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `group` with the same parameters."""
    return {key: v if key == "params" else map_tensors(v, Tensor.clone) for key, v in group.items()}


_after_steps: list[Callable[[Optimizer], None]] = []


@once
def after_every_step(callback: Callable[[Optimizer], None]) -> None:
    """Call `callback` after each step of any optimizer, from the first request on and for good.

    A hook that came and went with a scope would change torch's hooks while other threads iterate over them.
    """
    _after_steps.append(callback)
    register_optimizer_step_post_hook(lambda optimizer, _args, _kwargs: callback(optimizer))


def take_step(optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``optimizer.step``, then what follows every step: torch's hooks miss what is no `Optimizer`."""
    if isinstance(optimizer, Optimizer) or not hasattr(optimizer, "param_groups"):
        return optimizer.step(*args, **kwargs)
    result = optimizer.step(*args, **kwargs)
    for call in tuple(_after_steps):
        call(optimizer)
    return result


@once
def before_every_step(
    callback: Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], StepArguments | None],
) -> None:
    """Call `callback` before each step, as `after_every_step` does after it; it may replace the arguments."""
    register_optimizer_step_pre_hook(callback)


def around_closure(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    before: Callable[[], object] | None = None,
    after: Callable[[], object] | None = None,
) -> StepArguments:
    """Return the arguments of a step, with calls before and after each call of the closure among them."""

    def wrapped(closure: Any) -> Any:
        is_other = isinstance(closure, (nn.Module, type))  # such as the model of a second-order optimizer
        return _Closure(closure, before, after) if callable(closure) and not is_other else closure

    named = {"closure": wrapped(kwargs["closure"])} if "closure" in kwargs else {}
    return (*args[:1], *map(wrapped, args[1:2]), *args[2:]), {**kwargs, **named}


class _Closure:
    """A closure with calls around it; for the rest it is the same object, which may have methods."""

    def __init__(
        self,
        closure: Callable[..., Any],
        before: Callable[[], object] | None,
        after: Callable[[], object] | None,
    ) -> None:
        self.__wrapped__, self._before, self._after = closure, before, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            self._before()
        result = self.__wrapped__(*args, **kwargs)
        if self._after is not None:
            self._after()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)


def leaves_weights(optimizer: Optimizer) -> bool:
    """Return whether all learning rates are 0 now; a tensor on a device that the host would wait for is not.

    They are in the step by which ``torch.distributed.checkpoint.state_dict`` lets an optimizer make its
    states: each time that states of an optimizer are read or set which has none, as SGD without momentum.
    """
    rates = [group.get("lr") for group in optimizer.param_groups]
    return all([(not isinstance(rate, Tensor) or rate.is_cpu) and bool(rate == 0) for rate in rates])


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that `optimizer`, which has all of their parameters, steps itself."""
    values = getattr(optimizer, "__dict__", {}).values()
    inner = [each for each in values if isinstance(each, Optimizer)]
    own = set(map(id, parameters_of(optimizer))) if inner else set()
    return [each for each in inner if own.issuperset(map(id, parameters_of(each)))]


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that steps in the end, where `optimizer` lets another one do so."""
    known = [optimizer]
    while inner := [each for each in inner_optimizers(known[-1]) if not any(each is k for k in known)]:
        known.append(inner[0])
    return known[-1]


def watch_steps(
    callback: Callable[[Optimizer], None],
    *,
    after: bool,
    is_ours: Callable[[Tensor], bool] | None = None,
) -> Callable[[], None]:
    """Call `callback` before, or after, each step of any optimizer; return a function that ends that.

    Args:
        callback: what to call.
        after: whether to call it after the step.
        is_ours: leaves out other threads' steps of optimizers none of whose parameters it accepts.
    """
    calls, here = _watching(after), threading.get_ident()

    def call(optimizer: Optimizer) -> None:
        if is_ours is None or threading.get_ident() == here or any(map(is_ours, parameters_of(optimizer))):
            callback(optimizer)

    calls.append(call)
    return lambda: calls.remove(call)


def watch_gradients(callback: Callable[[Optimizer], None]) -> Callable[[], None]:
    """Call `callback` before any optimizer uses gradients; return a function that ends that.

    These are the gradients before each step, and those of each call of its closure.
    """
    calls = _watching_gradients()
    calls.append(callback)
    return lambda: calls.remove(callback)


@once
def _watching_gradients() -> list[Callable[[Optimizer], None]]:
    """Return the list of callbacks of one permanent hook."""
    calls: list[Callable[[Optimizer], None]] = []

    def tell(optimizer: Optimizer) -> None:
        for call in tuple(calls):
            call(optimizer)

    def look(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        if not calls:
            return None
        tell(optimizer)
        return around_closure(args, kwargs, after=functools.partial(tell, optimizer))

    before_every_step(look)
    return calls


@once
def _watching(after: bool) -> list[Callable[[Optimizer], None]]:
    """Return the list of callbacks of one permanent hook."""
    calls: list[Callable[[Optimizer], None]] = []

    def tell(optimizer: Optimizer, *_: object) -> None:
        for call in tuple(calls):
            call(optimizer)

    if after:
        after_every_step(tell)
    else:
        register_optimizer_step_pre_hook(tell)
    return calls
