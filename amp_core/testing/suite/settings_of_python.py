"""What belongs to the caller of a hook or kernel in Python and in NumPy."""

from __future__ import annotations

import gc
import locale
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from amp_core.plugin.surroundings import SETTINGS

BOTH = (True, False)


class Setting(NamedTuple):
    """Something that belongs to the caller, and values to try it with; one where there is no write."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    values: Sequence[Any]


def only_read(name: str, read: Callable[[], Any]) -> Setting:
    """Return a setting that keeps its value while it is watched."""
    return Setting(name, read, lambda _: None, (None,))


def seeded(seed: Callable[[int], Any], restore: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    """Return a writer of a generator: from a number, or from the state that was read."""

    def write(value: Any) -> None:
        if isinstance(value, int):
            seed(value)
        elif restore is not None:
            restore(value)

    return write


def tried(name: str, values: Sequence[Any], seed: Callable[[int], Any] | None = None) -> Setting:
    """Return a setting that plugins may not change either, with the values to try."""
    read, write = SETTINGS[name]
    return Setting(name, read, write if seed is None else seeded(seed, write), values)


def of_numpy() -> Iterator[Setting]:
    """Yield the settings of NumPy, where the program has it."""
    numpy: Any = sys.modules.get("numpy")  # None where a program keeps it from being imported
    if not numpy:
        return
    generator = numpy.random

    def state() -> tuple[Any, ...]:
        return generator.get_state()[1].tolist(), *generator.get_state()[2:]

    def restore(state: Any) -> None:
        generator.set_state(("MT19937", *state))

    def handle_errors(value: Any) -> None:
        numpy.seterr(**(value if isinstance(value, dict) else {"all": value}))

    yield Setting("NumPy's generator", state, seeded(generator.seed, restore), (1, 2))
    yield Setting("NumPy's handling of errors", numpy.geterr, handle_errors, ("warn", "ignore"))
    yield only_read("NumPy's print options", lambda: {k: str(v) for k, v in numpy.get_printoptions().items()})


def _set_filters(value: Any) -> None:
    warnings.resetwarnings()
    if isinstance(value, str):
        warnings.simplefilter(value)  # type: ignore[arg-type]


_TRIED = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C, and what ends a job
# `DataLoader` and `subprocess` wait for their children; others belong to debuggers and to schedulers.
_OTHERS = ("SIGCHLD", "SIGALRM", "SIGHUP", "SIGPIPE", "SIGABRT", "SIGSEGV", "SIGUSR1", "SIGUSR2")
_SIGNALS = (*_TRIED, *(getattr(signal, name) for name in _OTHERS if hasattr(signal, name)))


def _handlers() -> dict[str, Any]:
    return {number.name: signal.getsignal(number) for number in _SIGNALS}


def _set_handlers(value: Any) -> None:
    if threading.current_thread() is threading.main_thread():  # no other one may
        new = value if isinstance(value, dict) else {number.name: value for number in _TRIED}
        for number in _SIGNALS:
            handler = new.get(number.name)
            if handler is not None and handler != signal.getsignal(number):  # None: not installed by Python
                signal.signal(number, handler)


def _logging() -> tuple[int, int, tuple[logging.Handler, ...]]:
    root = logging.root
    return root.manager.disable, root.level, tuple(root.handlers)


def _set_logging(value: Any) -> None:
    root = logging.root
    disabled, level, handlers = value if isinstance(value, tuple) else (value, value, root.handlers)
    logging.disable(disabled)
    root.setLevel(level)
    root.handlers[:] = handlers


def _hooks() -> tuple[Any, ...]:
    return sys.excepthook, threading.excepthook, sys.unraisablehook


def _rounding() -> tuple[float, float]:
    """Return two sums that C's `fesetround` changes, in whichever direction."""
    return 1.0 + _SMALL, 1.0 - _SMALL


def _opening() -> int:
    return sys.getdlopenflags() if hasattr(sys, "getdlopenflags") else 0


_SMALL = 1e-30
_THRESHOLDS = ((700, 10, 10), (900, 11, 11))
OF_PYTHON = (
    Setting("Python's generator", random.getstate, seeded(random.seed, random.setstate), (1, 2)),
    Setting("the warnings filters", lambda: list(warnings.filters), _set_filters, ("always", "default")),
    Setting("logging", _logging, _set_logging, (logging.NOTSET, logging.DEBUG)),
    Setting("the collector", gc.isenabled, lambda value: gc.enable() if value else gc.disable(), BOTH),
    Setting("the collector's thresholds", gc.get_threshold, lambda v: gc.set_threshold(*v), _THRESHOLDS),
    Setting("the switching of threads", sys.getswitchinterval, sys.setswitchinterval, (0.005, 0.004)),
    tried("the working directory", (tempfile.gettempdir(),)),
    Setting("the limit of recursion", sys.getrecursionlimit, sys.setrecursionlimit, (3000,)),
    Setting("the handlers of signals", _handlers, _set_handlers, (signal.default_int_handler,)),
    only_read("the environment", lambda: dict(os.environ)),
    only_read("the search path of modules", lambda: list(sys.path)),
    only_read("the hooks for errors", _hooks),
    only_read("the display of warnings", lambda: warnings.showwarning),
    only_read("the locale", lambda: locale.setlocale(locale.LC_ALL)),
    only_read("the profiler of Python", sys.getprofile),
    only_read("the standard streams", lambda: (sys.stdin, sys.stdout, sys.stderr)),
    only_read("the CPUs of the thread", SETTINGS["the CPUs of the thread"][0]),
    only_read("the rounding of floats", _rounding),
    only_read("the flags of dlopen", _opening),
    only_read("how processes start", lambda: multiprocessing.get_start_method(allow_none=True)),
)
