"""Count the casts and tensor memory of a training step in the same way on every device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from amp_core._torch.tracing import TorchDispatchMode, to_copy


class StepWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while active. It slows the step down, so do not time a watched step.

    Attributes:
        casts: conversions from one floating-point dtype to another.
        peak_bytes: the peak memory of the given tensors and those created by the step, without
            kernel workspaces and allocator rounding.
    """

    def __init__(self, present: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts = 0
        self.peak_bytes = 0
        self._live: dict[int, int] = {}
        for tensor in present:
            self._track(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is to_copy:
            self.casts += args[0].is_floating_point() and result.dtype != args[0].dtype
        for output in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(output, Tensor):
                self._track(output)
        return result

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps one Python object per storage for the storage's lifetime
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        weakref.finalize(storage, self._live.pop, key)
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
