"""`script`, and the function it returns."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from amp_core._torch import torchscript as _torch_script
from amp_core._torch.autocast import autocast_devices_enabled
from amp_core.regions.region import autocast
from amp_core.scripting.rewrite import Ambient, rewrite

F = TypeVar("F", bound=Callable[..., Any])


def script(fn: F) -> F:
    """Compile `fn` with ``torch.jit.script``, with the same autocast behaviour as in eager mode.

    Regions enter eager autocast while the compiled code runs, so every op follows eager's rules. This covers
    decorators, `enabled` and device known only at run time, ``with autocast() as region`` and re-entering
    `region`, ``enabled=False`` under eager autocast, and custom ops. ``torch.jit.trace`` also records the
    region around the call. Regions that cannot be compiled raise an error with the user's file and line.

    Args:
        fn: a function whose source is available. Functions with regions that it calls by name are rewritten
            too.

    Returns:
        A function. Its ``.scripted`` attribute is the ``torch.jit.ScriptFunction``, with ``.graph`` and
        ``.code``. If `fn` has regions it cannot be saved, because regions call back into Python.

    Raises:
        ScriptRegionError: a region in `fn` cannot be compiled; the message says where, why and what to write
            instead.
        TypeError: `fn` is not a function.

    Example (in a file: TorchScript needs the source)::

        @amp_core.script
        def square(x):
            with amp_core.autocast("cpu", dtype=torch.bfloat16):
                return x @ x

        square(torch.ones(2, 2)).dtype  # torch.bfloat16
    """
    if not callable(fn) or isinstance(fn, (torch.nn.Module, type)):
        raise TypeError(
            f"amp_core.script takes a function, not {type(fn).__name__}; move the region into a function and "
            "call it from forward, or use torch.compile."
        )
    plain = rewrite(fn)

    @functools.lru_cache(maxsize=16)
    def compiled(ambient: Ambient, _optimized: bool) -> Any:
        # One executor for each kind of call: it keeps the plan of its first calls.
        with warnings.catch_warnings():
            # Callers of this function chose TorchScript; the documentation names its replacement. That torch
            # does not support it on their Python (3.14 and later) is news to them.
            warnings.filterwarnings("ignore", "`torch.jit.* is deprecated")
            return torch.jit.script(rewrite(fn, ambient))  # it would know a function that it has compiled

    def call(ambient: Ambient, *args: Any, **kwargs: Any) -> Any:
        # TorchScript's own formulas for gradients do not see the casts of eager autocast. Nor does its
        # optimized `addmm`, which is a product and an addition.
        if (ambient or has_regions) and (torch.is_grad_enabled() or splits_addmm):
            with torch.jit.optimized_execution(False):
                return compiled(ambient, False)(*args, **kwargs)
        return compiled(ambient, True)(*args, **kwargs)

    @functools.wraps(plain)
    def scripted(*args: Any, **kwargs: Any) -> Any:
        ambient = tuple((d, torch.get_autocast_dtype(d)) for d in autocast_devices_enabled())
        # Under eager autocast, TorchScript would run its own pass over the graph, and a trace would lose the
        # surrounding state. So compile that state into the graph as a region.
        with ExitStack() as stack:
            for device, _ in ambient:
                stack.enter_context(autocast(device, enabled=False))
            return call(ambient, *args, **kwargs)

    _torch_script.let_script_compile(scripted, plain)
    scripted.scripted = compiled((), True)  # type: ignore[attr-defined]
    has_regions = _torch_script.has_regions(scripted.scripted)  # type: ignore[attr-defined]
    splits_addmm = _torch_script.splits_addmm(scripted.scripted)  # type: ignore[attr-defined]
    return scripted  # type: ignore[return-value]
