"""Deprecation warnings with torch's text and category, attributed to the caller's line."""

# No `from __future__ import annotations`: inspect.signature would show strings.

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

from amp_core import autocast as core_autocast
from amp_core.common import environment as _env
from amp_core.common.locks import new_lock
from amp_core.scaling.step_record import rank

F = TypeVar("F", bound=Callable[..., Any])

_warned: set[tuple[str, str, int]] = set()
_lock = new_lock()


def warn(message: str, stacklevel: int) -> None:
    """Issue the FutureWarning `message`, `stacklevel` frames up from the caller of this function.

    With ``AMP_DEPRECATION=once``, warn once per line of code and only in the process of rank 0.
    """
    if _env.deprecation_once() and not _is_first(message, sys._getframe(stacklevel)):
        return
    warnings.warn(message, FutureWarning, stacklevel=stacklevel + 1)


def _is_first(message: str, frame: Any) -> bool:
    if rank() or _env.rank() > 0:
        return False
    site = (message, frame.f_code.co_filename, frame.f_lineno)
    with _lock:
        first = site not in _warned
        _warned.add(site)
    return first


def deprecated_function(message: str) -> Callable[[F], F]:
    """Make a function or ``__init__`` warn at its caller's line."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            warn(message, stacklevel=2)
            return function(*args, **kwargs)

        wrapper.__deprecated__ = message  # type: ignore[attr-defined]
        return wrapper  # type: ignore[return-value]

    return decorate


class DeprecatedAutocast(core_autocast):
    """Base of the deprecated `autocast` classes, which warn when instantiated or subclassed."""

    __deprecated__: ClassVar[str]
    _deprecated_class: ClassVar[type]

    def __init_subclass__(cls, *, message: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if message is None:
            warn(cls.__deprecated__, stacklevel=2)
            return
        cls.__deprecated__ = message
        cls._deprecated_class = cls
        # TorchScript compiles methods of the class body, and type checkers take an assignment for one.
        type.__setattr__(cls, "__new__", _new_with_signature(cls))


def _new_with_signature(cls: type) -> Any:
    """Return a ``__new__`` that warns and has the signature of `cls`.

    ``inspect.signature`` checks ``__new__`` before ``__init__``; on Python 3.13.0 a class decorated with
    ``warnings.deprecated`` shows ``(*args, **kwargs)``.
    """

    def __new__(cls: type[DeprecatedAutocast], *_: Any, **__: Any) -> Any:  # noqa: N807
        # torch's give no warning while a function is compiled: the caller would be Dynamo.
        if cls is cls._deprecated_class and not torch.compiler.is_compiling():
            warn(cls.__deprecated__, stacklevel=2)
        return torch.autocast.__new__(cls)

    __new__.__signature__ = inspect.signature(cls.__init__)  # type: ignore[attr-defined, misc]
    return staticmethod(__new__)
