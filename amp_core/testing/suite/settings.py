"""What belongs to the caller of a hook or kernel: settings of torch, of Python and of the process."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from amp_core.plugin.surroundings import SETTINGS
from amp_core.testing.fixtures import BackendFixtures

BOTH = (True, False)


class Setting(NamedTuple):
    """Something that belongs to the caller, and values to try it with; one where there is no write."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    values: Sequence[Any]


PROCESS_WIDE = frozenset(
    {
        "the default dtype", "the precision of float32 products", "deterministic algorithms",
        "the number of threads", "cuDNN's TF32",
        "oneDNN", "torch's generator", "Python's generator", "NumPy's generator", "the environment",
        "the warnings filters", "logging", "the working directory", "the search path of modules",
        "the flags of torch's backends",
    }
)  # fmt: skip
"""Settings that other threads see, too, so they must not change even for a moment."""


def change(setting: Setting, before: Any, now: Any) -> str:
    """Say what changed."""
    if isinstance(before, dict):
        before, now = (dict(set(a.items()) - set(b.items())) for a, b in ((before, now), (now, before)))
    return f"{setting.name}: {before!r:.80} to {now!r:.80}"


def settings(subject: BackendFixtures) -> list[Setting]:
    """Return all settings, for the device of `subject`."""
    found = [*_OF_TORCH, *_of_autocast(subject), *_OF_PYTHON, *_of_device(subject.device)]
    if sys.modules.get("numpy"):  # None where a program keeps it from being imported
        numpy = sys.modules["numpy"].random
        read = lambda: (numpy.get_state()[1].tolist(), *numpy.get_state()[2:])  # noqa: E731
        restore = lambda state: numpy.set_state(("MT19937", *state))  # noqa: E731
        found.append(Setting("NumPy's generator", read, _seed(numpy.seed, restore), (1, 2)))
        errors = sys.modules["numpy"].geterr, _set_numpy_errors
        found.append(Setting("NumPy's handling of errors", *errors, ("warn", "ignore")))
    if torch.set_flush_denormal(_flushes()):  # which says whether the host can
        found.append(Setting("the flushing of subnormals", _flushes, torch.set_flush_denormal, (False,)))
    return found


def _of_autocast(subject: BackendFixtures) -> list[Setting]:
    kind = subject.device_type
    # Where torch has no autocast of its own, only a region makes its key passable.
    regions = BOTH if subject.default_dtype_is_torchs else (False,)
    return [
        Setting(
            "autocast",
            lambda: torch.is_autocast_enabled(kind),
            lambda value: torch.set_autocast_enabled(kind, value),
            regions,
        ),
        Setting(
            "autocast's dtype",
            lambda: torch.get_autocast_dtype(kind),
            lambda value: torch.set_autocast_dtype(kind, value),
            subject.backend.supported_dtypes(),
        ),
        Setting("autocast's cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, BOTH),
    ]


def _of_device(device: torch.device) -> list[Setting]:
    module, found = torch.get_device_module(device), []
    if hasattr(module, "current_stream"):
        back = getattr(module, "set_stream", _no_write)
        found.append(Setting("the current stream", module.current_stream, back, (module.current_stream(),)))
    if device.type == "cpu":
        return found
    if hasattr(module, "get_rng_state") and hasattr(module, "manual_seed_all"):

        def generator() -> list[int]:
            try:
                state = module.get_rng_state()
            except TypeError:  # some devices have no default for the device
                state = module.get_rng_state(torch.empty(0, device=device).device)
            return cast("list[int]", state.tolist())

        found.append(Setting("the device's generator", generator, _seed(module.manual_seed_all), (1, 2)))
    if hasattr(module, "set_device"):
        devices = range(module.device_count())
        found.append(Setting("the current device", module.current_device, module.set_device, devices))
    return found


def _seed(seed: Callable[[int], Any], restore: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    """Return a writer of a generator: from a number, or from the state that was read."""

    def write(value: Any) -> None:
        if isinstance(value, int):
            seed(value)
        elif restore is not None:
            restore(value)

    return write


def _set_filters(value: Any) -> None:
    warnings.resetwarnings()
    if isinstance(value, str):
        warnings.simplefilter(value)  # type: ignore[arg-type]


def _flushes() -> bool:
    return float(torch.full((1,), 1e-40, dtype=torch.float32, device="cpu").mul_(1.0)) == 0.0


def _set_numpy_errors(value: Any) -> None:
    numpy: Any = sys.modules["numpy"]
    numpy.seterr(**(value if isinstance(value, dict) else {"all": value}))


_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C, and what ends a job


def _handlers() -> dict[str, Any]:
    return {number.name: signal.getsignal(number) for number in _SIGNALS}


def _set_handlers(value: Any) -> None:
    if threading.current_thread() is threading.main_thread():  # no other one may
        for number in _SIGNALS:
            signal.signal(number, value[number.name] if isinstance(value, dict) else value)


def _logging() -> tuple[int, int, tuple[logging.Handler, ...]]:
    root = logging.root
    return root.manager.disable, root.level, tuple(root.handlers)


def _set_logging(value: Any) -> None:
    root = logging.root
    disabled, level, handlers = value if isinstance(value, tuple) else (value, value, root.handlers)
    logging.disable(disabled)
    root.setLevel(level)
    root.handlers[:] = handlers


_KERNELS: Any = torch.backends.cuda
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")


def _flags() -> dict[str, bool]:
    """Return which of several implementations torch's ops may take."""
    cudnn, matmul = torch.backends.cudnn, _KERNELS.matmul
    return {
        "cudnn.enabled": cudnn.enabled,
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "cuda.matmul.bf16": matmul.allow_bf16_reduced_precision_reduction,
        **{name: getattr(_KERNELS, f"{name}_sdp_enabled")() for name in _ATTENTION},
    }


def _set_flags(value: Any) -> None:
    wanted = value if isinstance(value, dict) else dict.fromkeys(_flags(), value)
    names = ("enabled", "benchmark", "deterministic")
    torch.backends.cudnn.set_flags(**{f"_{name}": wanted[f"cudnn.{name}"] for name in names})  # type: ignore[no-untyped-call]
    _KERNELS.matmul.allow_bf16_reduced_precision_reduction = wanted["cuda.matmul.bf16"]
    for name in _ATTENTION:
        getattr(_KERNELS, f"enable_{name}_sdp")(wanted[name])


def _determinism() -> tuple[bool, bool]:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns


def _set_determinism(value: Any) -> None:
    enabled, warns = value if isinstance(value, tuple) else (value, True)
    torch.use_deterministic_algorithms(enabled, warn_only=warns)


_CONV: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]


def _set_cudnn_precision(value: Any) -> None:
    """Switch TF32 on or off, or restore a precision that only the newer setting knows."""
    if value in (True, False, "tf32", "none"):
        # Unlike the attribute, this also works where `torch.testing` has frozen the flags.
        torch.backends.cudnn.set_flags(_allow_tf32=value in (True, "tf32"), _fp32_precision=None)  # type: ignore[no-untyped-call]
    else:
        _CONV.fp32_precision = value


def _no_write(_: Any) -> None:
    pass


def _tried(name: str, values: Sequence[Any], seed: Callable[[int], Any] | None = None) -> Setting:
    """Return a setting that plugins may not change either, with the values to try."""
    read, write = SETTINGS[name]
    return Setting(name, read, write if seed is None else _seed(seed, write), values)


_OF_TORCH = (
    _tried("grad mode", BOTH),
    Setting("inference mode", torch.is_inference_mode_enabled, _no_write, (False,)),
    Setting("anomaly mode", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, BOTH),
    _tried("the default dtype", (torch.float16, torch.float32)),
    _tried("the default device", (torch.device("meta"), torch.device("cpu"))),
    _tried("the number of threads", (1, 2, 3)),
    _tried("the precision of float32 products", ("high", "highest")),
    Setting(
        "the sums of float16 products",
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        lambda value: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", value),
        BOTH,
    ),
    Setting("cuDNN's TF32", lambda: _CONV.fp32_precision, _set_cudnn_precision, BOTH),
    Setting("oneDNN", lambda: torch.backends.mkldnn.enabled, torch.backends.mkldnn.set_flags, (True,)),
    Setting("the flags of torch's backends", _flags, _set_flags, BOTH),
    Setting("deterministic algorithms", _determinism, _set_determinism, BOTH),
    # Not the state alone: a call that seeds would find the state that the one before it left.
    _tried("torch's generator", (1, 2), torch.manual_seed),
    Setting("the repetition of warnings", torch.is_warn_always_enabled, torch.set_warn_always, BOTH),
)

_THRESHOLDS = ((700, 10, 10), (900, 11, 11))
_OF_PYTHON = (
    Setting("Python's generator", random.getstate, _seed(random.seed, random.setstate), (1, 2)),
    Setting("the warnings filters", lambda: list(warnings.filters), _set_filters, ("always", "default")),
    Setting("logging", _logging, _set_logging, (logging.NOTSET, logging.DEBUG)),
    Setting("the collector", gc.isenabled, lambda value: gc.enable() if value else gc.disable(), BOTH),
    Setting("the collector's thresholds", gc.get_threshold, lambda v: gc.set_threshold(*v), _THRESHOLDS),
    Setting("the switching of threads", sys.getswitchinterval, sys.setswitchinterval, (0.005, 0.004)),
    Setting("the environment", lambda: dict(os.environ), _no_write, (0,)),
    _tried("the working directory", (tempfile.gettempdir(),)),
    Setting("the search path of modules", lambda: list(sys.path), _no_write, (0,)),
    Setting("the limit of recursion", sys.getrecursionlimit, sys.setrecursionlimit, (3000,)),
    Setting("the handlers of signals", _handlers, _set_handlers, (signal.default_int_handler,)),
    Setting("the hooks for errors", lambda: (sys.excepthook, threading.excepthook), _no_write, (0,)),
)
