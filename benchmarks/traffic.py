"""How many bytes of gradients are read and written between backward and step; counted, not timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import amp_core
from benchmarks.ab import Ratio
from benchmarks.gradients import NoStep, sides_of_step
from benchmarks.shapes import gpt2_small

_SMALL = 1024  # elements: what is smaller holds norms and flags, not gradients


def run() -> Iterator[Ratio]:
    """Count a step of GPT-2 small with an optimizer that does nothing; bytes in place of seconds."""
    for clip in (True, False):
        theirs, ours = sides_of_step(gpt2_small(), NoStep, {}, clip=clip)
        read, written = (_count(theirs), _count(ours))
        how = "clip" if clip else "no clip"
        for what, a, b in zip(("read", "written"), read, written, strict=True):
            yield Ratio(f"GPT-2 small, no-op, {how}: {what}", a, b, b / a, unit="B")


def _count(step: Callable[[], object]) -> tuple[int, int]:
    step()
    with _Counting() as seen, _kernels_counted(seen):
        step()
    return seen.read, seen.written


class _Counting(TorchDispatchMode):
    """Counts what torch's operations read and write, by what their schemas say."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for argument, value in zip(func._schema.arguments, args, strict=False):
            size = _bytes(value)
            aliased = argument.alias_info is not None
            if not aliased or argument.alias_info.is_write:
                self.read += size
            if aliased and argument.alias_info.is_write:
                self.written += size
        if not any(r.alias_info for r in func._schema.returns):
            self.written += _bytes(out)
        return out


@contextlib.contextmanager
def _kernels_counted(seen: _Counting) -> Iterator[None]:
    # Compiled kernels are no operations of torch: the contract says what each reads and writes.
    kernels = amp_core.get_backend("cpu").kernels()
    measure, scale = kernels.grad_stats, kernels.multiply_

    def counted_measure(grads: Any, *args: Any) -> Any:
        seen.read += _bytes(grads)
        return measure(grads, *args)

    def counted_scale(grads: Any, *args: Any) -> None:
        seen.read += _bytes(grads)
        seen.written += _bytes(grads)
        scale(grads, *args)

    with mock.patch.multiple(kernels, grad_stats=counted_measure, multiply_=counted_scale):
        yield


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size() if value.numel() > _SMALL else 0
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0
