"""`script`, and the function that it returns."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from amp_core._torch import internals as _torch
from amp_core._torch import torchscript as _torch_script
from amp_core.regions.region import autocast
from amp_core.scripting.rewrite import Ambient, rewrite

F = TypeVar("F", bound=Callable[..., Any])


def script(fn: F) -> F:
    """Compile `fn` with ``torch.jit.script`` so that its autocast regions mean what they mean in eager mode.

    Regions enter eager autocast while the compiled code runs, so that every op follows eager's rules:
    decorators, run-time `enabled` and device, ``with autocast() as region`` and entering `region` again,
    `enabled=False` under eager autocast, custom ops. Under ``torch.jit.trace`` the region around the call
    is recorded too. What cannot be had is an error with the user's file and line.

    Args:
        fn: a function whose source can be read. Functions that it calls by a global name are rewritten
            too, where they have regions.

    Returns:
        A function; ``.scripted`` holds the ``torch.jit.ScriptFunction``, with ``.graph`` and ``.code``. Where
        there are regions it cannot be saved: they call back into Python.

    Raises:
        ScriptRegionError: a region in `fn` cannot be compiled; the text says where, why and what to write.
        TypeError: `fn` is not a function.
    """
    if not callable(fn) or isinstance(fn, (torch.nn.Module, type)):
        raise TypeError(
            f"amp_core.script takes a function, not {type(fn).__name__}; put the region into a function and "
            "call that from forward, or use torch.compile."
        )
    plain = rewrite(fn)

    @functools.lru_cache(maxsize=16)
    def compiled(ambient: Ambient) -> Any:
        with warnings.catch_warnings():
            # Users who chose this function know; the replacement is in the documentation beside it.
            warnings.filterwarnings("ignore", "`torch.jit")
            return torch.jit.script(rewrite(fn, ambient) if ambient else plain)

    @functools.wraps(plain)
    def scripted(*args: Any, **kwargs: Any) -> Any:
        ambient = _ambient()
        if not ambient:
            return compiled(ambient)(*args, **kwargs)
        # Under eager autocast TorchScript would run its own pass over the graph, and a trace would lose the
        # state around the call: the graph gets that state as a region of its own.
        with ExitStack() as stack:
            for device, _ in ambient:
                stack.enter_context(autocast(device, enabled=False))
            return compiled(ambient)(*args, **kwargs)

    _torch_script.let_script_compile(scripted, plain)
    scripted.scripted = compiled(())  # type: ignore[attr-defined]
    return scripted  # type: ignore[return-value]


def _ambient() -> Ambient:
    """The devices on which eager autocast is on, with its dtype."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in _torch.autocast_devices_enabled())
