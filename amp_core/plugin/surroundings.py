"""Keep the program's settings while a plugin loads, which may be in the middle of a computation."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from amp_core.common import environment


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _random_state() -> list[int]:
    state: list[int] = torch.get_rng_state().tolist()
    return state


def _set_random_state(state: list[int]) -> None:
    torch.set_rng_state(torch.tensor(state, dtype=torch.uint8, device="cpu"))


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it has been removed
        return ""


def _precision() -> tuple[str, ...]:
    """Return what torch's older setting is, if it is any, and those of `torch.backends`."""
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer ones have values for which the older has no name
        older = ""
    return (older, *(each.fp32_precision for each in _PRODUCTS))


def _set_precision(value: str | tuple[str, ...]) -> None:
    older, *newer = (value,) if isinstance(value, str) else value
    if older:
        torch.set_float32_matmul_precision(older)
    for each, precision in zip(_PRODUCTS, newer, strict=False):
        each.fp32_precision = precision


def _flushes() -> bool:
    return _LEAST_NORMAL * 0.5 == 0.0  # in Python: a program's modes may take torch's ops


_LEAST_NORMAL = sys.float_info.min


def _cpus() -> set[int]:
    """Return the CPUs that may run this thread and those that it starts; none if OpenMP is told to bind."""
    if sys.platform != "linux" or environment.openmp_binds():
        return set()
    return os.sched_getaffinity(0)


def _set_cpus(cpus: set[int]) -> None:
    if sys.platform == "linux":
        os.sched_setaffinity(0, cpus)


_PRODUCTS: Any = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]

_GENERATOR = "torch's generator"
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (torch.get_default_device, _set_default_device),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the precision of float32 products": (_precision, _set_precision),
    _GENERATOR: (_random_state, _set_random_state),
    "the working directory": (_folder, os.chdir),
    "the flushing of subnormals": (_flushes, torch.set_flush_denormal),
    "the CPUs of the thread": (_cpus, _set_cpus),
}


@contextmanager
def restored() -> Iterator[list[str]]:
    """Put back what the block changes of the program; after it, the list yielded says what that was."""
    changed: list[str] = []
    others_run = len(sys._current_frames()) > 1
    kept = [name for name in SETTINGS if not (others_run and name == _GENERATOR)]  # they may draw numbers
    before = {name: SETTINGS[name][0]() for name in kept}
    try:
        yield changed
    finally:
        for name in kept:
            read, write = SETTINGS[name]
            now = read()
            if now != before[name]:
                write(before[name])
                changed.append(name if isinstance(now, list) else f"{name} ({before[name]} to {now})")
