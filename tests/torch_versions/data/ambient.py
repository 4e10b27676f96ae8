"""Import amp-core, and probe its features, in each ambient state; print the features that are off as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode


class Mode(TorchFunctionMode):
    """A mode of the user's."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Make float64 the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield


STATES: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default device": lambda: torch.device("meta"),
    "FakeTensorMode": FakeTensorMode,
    "TorchFunctionMode": Mode,
    "autocast": lambda: torch.autocast("cpu"),
    "float64": float64,
}


def features_off() -> dict[str, str]:
    """Import amp-core, unless it is imported, and probe."""
    from amp_core._torch.features import statuses

    return {status.feature: status.reason for status in statuses() if not status.works}


def report(state: str) -> None:
    """Print what is off in `state`."""
    if state == "torch.func":
        torch.func.grad(lambda x: (print(json.dumps([state, features_off()])), x.sum())[1])(torch.ones(2))
    else:
        with STATES[state]():
            off = features_off()
        print(json.dumps([state, off]))


def in_children(states: Iterable[str]) -> None:
    """Fork a process for each state."""
    for state in states:
        child = os.fork()
        if not child:
            try:
                report(state)
            finally:
                sys.stdout.flush()
                os._exit(0)
        os.waitpid(child, 0)


# Each child imports Dynamo, which takes seconds, so only in states that tensors notice.
in_children(["inference_mode", "default device", "FakeTensorMode"])
import torch._dynamo  # noqa: E402

in_children([*STATES, "torch.func"])
import amp_core._torch.dynamo  # noqa: E402
import amp_core._torch.tracing  # noqa: E402, F401

in_children([*STATES, "torch.func"])
