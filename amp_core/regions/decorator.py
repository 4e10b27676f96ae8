"""Run a function's body inside a region, including generators and coroutines."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from typing_extensions import ParamSpec

from amp_core._torch.autocast import torch_autocast
from amp_core._torch.torchscript import copy_marks

P = ParamSpec("P")
R = TypeVar("R")
Context = AbstractContextManager[Any]


def autocast_decorator(autocast_instance: Context, func: Callable[P, R]) -> Callable[P, R]:
    """Return `func` with its body run inside `autocast_instance`.

    The body of a generator, coroutine or async generator runs inside the region too. The region is left
    whenever the body is suspended, so it never affects the code that resumes it.

    Args:
        autocast_instance: a reentrant context manager, such as an `autocast` or `disable` instance.
        func: a function, generator function, coroutine function or async generator function.

    Returns:
        A function of the same kind and signature.

    Raises:
        TypeError: an argument is none of these.

    Example:
        >>> import torch, amp_core
        >>> def square(x):
        ...     return x @ x
        >>> amp_core.autocast_decorator(amp_core.autocast("cpu"), square)(torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    if not hasattr(autocast_instance, "__enter__") or not callable(func):
        raise TypeError(
            f"autocast_decorator() needs a context manager and a function, not {autocast_instance!r} and "
            f"{func!r}."
        )
    if inspect.isasyncgenfunction(func):
        wrapped = _async_generator(autocast_instance, func)
    elif inspect.iscoroutinefunction(func):
        wrapped = _coroutine(autocast_instance, func)
    elif inspect.isgeneratorfunction(func):
        wrapped = around_generator(autocast_instance, func)
    else:
        wrapped = _function(autocast_instance, func)
    copy_marks(_refused_by_script(), wrapped)
    return cast("Callable[P, R]", wrapped)


@functools.cache
def _refused_by_script() -> Callable[..., Any]:
    """Return a function that ``torch.jit.script`` refuses, because it would lose the region."""
    return cast("Callable[..., Any]", torch_autocast("cpu", enabled=False)(_no_op))


def _no_op() -> None: ...


def _function(region: Context, func: Callable[..., R]) -> Callable[..., R]:
    @functools.wraps(func)
    def decorate_autocast(*args: Any, **kwargs: Any) -> R:
        with region:
            return func(*args, **kwargs)

    return decorate_autocast


def around_generator(region: Context, func: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Any]:
    """Return the generator function `func` with its body run inside `region`; Dynamo can trace it."""
    return functools.wraps(func)(_resumed_inside(region, func))


def _coroutine(region: Context, func: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    @functools.wraps(func)
    async def decorate_autocast(*args: Any, **kwargs: Any) -> Any:
        return await _Inside(region, func(*args, **kwargs))

    return decorate_autocast


def _async_generator(region: Context, func: Callable[..., AsyncGenerator[Any, Any]]) -> Callable[..., Any]:
    @functools.wraps(func)
    async def decorate_autocast(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        body = func(*args, **kwargs)
        steps: list[Awaitable[Any]] = [body.__anext__()]  # in lists: see `_resumed_inside`
        items: list[Any] = []
        try:
            while True:
                try:
                    items.append(await _Inside(region, steps.pop()))
                except StopAsyncIteration:
                    return
                try:
                    steps.append(body.asend((yield items.pop())))
                except GeneratorExit:
                    raise
                except BaseException as error:  # raised again inside the body
                    steps.append(body.athrow(error))
        finally:
            await _Inside(region, body.aclose())

    return decorate_autocast


class _Inside:
    """An awaitable that runs each of its steps inside a region."""

    def __init__(self, region: Context, awaitable: Awaitable[Any]) -> None:
        self._region = region
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        return _resumed_inside(self._region, self._awaitable.__await__)()


def _resumed_inside(region: Context, func: Callable[..., Any]) -> Callable[..., Generator[Any, Any, Any]]:
    """Return `func` with `region` entered for each step; forward values, errors and ``close``.

    What goes through is taken out of lists: a local variable would keep a yielded tensor until the next step,
    and an error in a circle with its traceback.
    """

    # One generator: Dynamo closes none to which another one delegates.
    def decorate_autocast(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with region:
            body = func(*args, **kwargs)
        resume: list[Callable[[], Any]] = [functools.partial(next, body)]
        items: list[Any] = []
        while True:
            with region:
                try:  # in the block: Dynamo loses a StopIteration that leaves one
                    items.append(resume.pop()())
                except StopIteration as stop:
                    return stop.args[0] if stop.args else None  # Dynamo of torch 2.11 knows no `stop.value`
            try:
                sent = yield items.pop()
            except GeneratorExit:
                with region:
                    body.close()
                raise
            except BaseException as error:  # raised again inside the body
                resume.append(functools.partial(body.throw, error))
            else:
                resume.append(
                    functools.partial(next, body) if sent is None else functools.partial(body.send, sent)
                )
                del sent

    return decorate_autocast
