"""Memory for casts and gradients, reused across steps."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage

from amp_core._torch.tensors import is_in_use
from amp_core.kernels.memory import without_gaps
from amp_core.plugin.default_manager import get_backend

_SMALL = 2**16
"""Up to this many bytes, the C library's heap usually has free memory."""


class KeptMemory:
    """A pool that hands out memory again once nothing refers to it.

    On the CPU, page faults make fresh memory for a large tensor cost more than writing the tensor. Most
    devices have a caching allocator (`Backend.caches_memory`); for those this pool keeps nothing.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, int], deque[UntypedStorage]] = defaultdict(deque)
        self._pauses: dict[tuple[torch.device, int], int] = defaultdict(int)  # requests without a search

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized tensor of `count` elements."""
        if not _is_kept(count * dtype.itemsize, device):
            return torch.empty(count, dtype=dtype, device=device)
        return self._take(dtype, device, (count,), (1,))

    def empty_like(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor with the shape of `tensor`, and its strides if it is dense."""
        is_kept = _is_kept(tensor.numel() * dtype.itemsize, tensor.device)
        if not is_kept or not (tensor.is_contiguous() or without_gaps(tensor)):
            return torch.empty_like(tensor, dtype=dtype)
        return self._take(dtype, tensor.device, tensor.shape, tensor.stride())

    def _take(
        self, dtype: torch.dtype, device: torch.device, shape: Sequence[int], stride: Sequence[int]
    ) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        storage = self._idle(nbytes, device)
        tensor = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, stride)
        self._kept[device, nbytes].appendleft(storage)
        return tensor

    def _idle(self, nbytes: int, device: torch.device) -> UntypedStorage:
        """Take a storage out of the pool, so that no thread or signal handler gets it too, or make one."""
        # Try the newest first, since it is freed soonest. Storages in use go to the end. After a search
        # in vain, an eighth as many requests try one storage each, so growth takes linear time.
        kept = self._kept[device, nbytes]
        pause = self._pauses[device, nbytes]
        self._pauses[device, nbytes] = pause - 1 if pause else len(kept) // 8
        for _ in range(min(1, len(kept)) if pause else len(kept)):
            try:
                storage = kept.popleft()
            except IndexError:
                break
            if is_in_use(storage):
                kept.append(storage)
            elif storage.nbytes() == nbytes and not storage.is_shared():
                self._pauses[device, nbytes] = 0
                return storage  # else it is resized, or mapped by another process, which may still read it
        return UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]

    def idle_nbytes(self) -> int:
        """Return the bytes kept but not in use."""
        kept = [storage for storages in self._kept.copy().values() for storage in storages.copy()]
        return sum(storage.nbytes() for storage in kept if not is_in_use(storage))

    def clear(self) -> None:
        """Release all kept memory; storages in use live on with their tensors."""
        self._kept.clear()
        self._pauses.clear()


def _is_kept(nbytes: int, device: torch.device) -> bool:
    return nbytes > _SMALL and not get_backend(device.type).caches_memory
