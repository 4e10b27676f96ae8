"""What one training step casts, and how much memory its tensors take, measured alike on every device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amp_core._torch.internals import TorchDispatchMode


class StepWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered; it slows the step down, so do not time one that is watched.

    Attributes:
        casts: conversions from one floating-point dtype to another.
        peak_bytes: the most that tensors held at once, from those given and those the step made.
            What a kernel needs for itself and what an allocator rounds up is not in it.
    """

    def __init__(self, present: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts = 0
        self.peak_bytes = 0
        self._live: dict[int, int] = {}
        for tensor in present:
            self._hold(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.casts += args[0].is_floating_point() and result.dtype != args[0].dtype
        for output in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(output, Tensor):
                self._hold(output)
        return result

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps one Python object per storage for as long as that lives
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        weakref.finalize(storage, self._live.pop, key)
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
