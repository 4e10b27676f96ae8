"""What calls need of the process: open files, and a fork of it."""

from __future__ import annotations

import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

_PATIENCE = 20.0  # seconds; on a busy machine a child starts late
_DONE = "done"


def open_files() -> int:
    """Return how many files the process has open; 0 where the system does not say."""
    return len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0


def wrong_in_a_child(calls: Mapping[str, Callable[[], Any]]) -> str:
    """Run `calls` in a forked child, as a worker of a `DataLoader` would; say what goes wrong there."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other threads run: it is about them
        child = os.fork()
    if not child:
        _work(writer, calls)
    os.close(writer)
    try:
        said = _until_done(reader)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)  # which may hang
        os.waitpid(child, 0)
    *_, last = ["starting", *said.splitlines()]
    return "" if last == _DONE else last


def _work(writer: int, calls: Mapping[str, Callable[[], Any]]) -> None:
    """Write what is called, and at the end that all is done; never return."""
    try:
        torch.set_num_threads(1)  # as a worker does: OpenMP's threads do not follow a fork either
        for name, call in calls.items():
            os.write(writer, f"{name} does not return\n".encode())
            try:
                call()
            except BaseException as error:
                os.write(writer, f"{name} raises {error!r}\n".encode())
                os._exit(1)
        os.write(writer, _DONE.encode())
    finally:
        os._exit(0)


def _until_done(reader: int) -> str:
    """Return what the child writes until it ends, or for as long as it may take."""
    said, end = b"", time.monotonic() + _PATIENCE
    while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
        some = os.read(reader, 4096)
        if not some:
            break
        said += some
    return said.decode()
