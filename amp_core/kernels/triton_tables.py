"""Device tables of tensor addresses for Triton programs, built without synchronization."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from amp_core.common import environment as _env
from amp_core.common.locks import new_lock
from amp_core.errors import KernelLaunchError
from amp_core.kernels import triton_programs as programs

_CACHED_ROWS = 64
"""Number of shape lists whose rows are cached: weights and gradients of a few models."""

_RECENT = 4
"""Number of address lists cached per shape list: gradients, weights, their casts."""

_for_replay: list[Any] = []
"""Tables that captured graphs read at each replay. Destroyed graphs cannot be detected, so the tables stay: 8
bytes per tensor, plus 16 per chunk of 16384 elements for shapes first seen during a capture."""


@dataclass(frozen=True)
class Group:
    """Rows of tensors of one kind, processed by one launch."""

    kind: Any
    first: int
    count: int


class Rows:
    """The division of a list of tensors into rows, independent of their addresses.

    Attributes:
        sizes: int64, shape ``(n,)``: elements of each tensor.
        first, end: int64, shape ``(n,)``: the row range of each tensor.
        tensor, start: int64, shape ``(count,)``: each row's tensor, and its first element in it.
        groups: the rows of each kind of tensor.
        captured: whether they were created during a graph capture, so they are empty until a replay.
    """

    def __init__(self, kinds: Sequence[Hashable], sizes: Sequence[int], device: torch.device) -> None:
        n = len(sizes)
        cuts = [-(-size // programs.CHUNK) for size in sizes]
        self.groups = list(_groups(kinds, cuts))
        place = {group.kind: i for i, group in enumerate(self.groups)}
        order = sorted(range(n), key=lambda i: place.get(kinds[i], 0))
        ends = list(accumulate(cuts[i] for i in order))
        first, end = [0] * n, [0] * n
        for i, last in zip(order, ends, strict=True):
            first[i], end[i] = last - cuts[i], last
        self.count = ends[-1]
        counts = [cuts[i] for i in order]
        # Align each part to 16 bytes: Triton recompiles for unaligned addresses.
        padded = [[*part, *[0] * (n % 2)] for part in (sizes, first, end, order, counts)]
        packed = numbers(list(chain.from_iterable(padded)), device)
        self.sizes, self.first, self.end, ordered, counted = (t[:n] for t in packed.view(5, -1).unbind())
        self.tensor = torch.repeat_interleave(ordered, counted, output_size=self.count)
        within = torch.arange(self.count, device=device) - self.first.index_select(0, self.tensor)
        self.start = within * programs.CHUNK
        self.captured = is_capturing(device)
        if not self.captured:
            _load_writer(device)
        self._stream = stream_of(device)
        shared = self._stream is not None and not self.captured
        self._written = self._stream.record_event() if shared else None
        self._recent: list[tuple[list[int], Any, Tensor]] = []

    def addresses(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the addresses of `tensors`, which must have these sizes, as a tensor on their device.

        Recent tables are cached because a caching allocator reuses the addresses of the previous step's
        gradients.
        """
        device, addresses = self.sizes.device, list(map(Tensor.data_ptr, tensors))
        stream, capturing = stream_of(device), is_capturing(device)
        if not capturing:
            self._follow(stream)
        # Tables written before a capture are visible to all streams, because its start waits for them.
        cached = [
            t for key, made_on, t in self._recent if (capturing or made_on == stream) and key == addresses
        ]
        table = cached[0] if cached else numbers(addresses, device)
        if capturing:
            _for_replay.append((self, table))
        elif not cached:
            self._recent = [(addresses, stream, table), *self._recent[: _RECENT - 1]]
        return table

    def _follow(self, stream: Any) -> None:
        """Make the rows usable on another stream than the one that wrote them."""
        if stream != self._stream:
            stream.wait_event(self._written)  # not for later work on that stream
            for tensor in (self.sizes, self.tensor, self.start):
                tensor.record_stream(stream)


def _groups(kinds: Sequence[Hashable], cuts: Sequence[int]) -> Iterator[Group]:
    totals: dict[Hashable, int] = {}
    for kind, count in zip(kinds, cuts, strict=True):
        totals[kind] = totals.get(kind, 0) + count
    first = 0
    for kind, count in totals.items():
        if count:
            yield Group(kind, first, count)
        first += count


_rows_cache: dict[Hashable, Rows] = {}
_lock = new_lock()


def rows_of(kinds: tuple[Hashable, ...], sizes: tuple[int, ...], device: torch.device) -> Rows:
    """Return the cached rows for tensors of these kinds and sizes on `device`."""
    key = (device, kinds, sizes)
    with _lock:
        rows = _rows_cache.pop(key, None) or Rows(kinds, sizes, device)
        if not rows.captured:
            _rows_cache[key] = rows
            while len(_rows_cache) > _CACHED_ROWS:
                del _rows_cache[next(iter(_rows_cache))]
    return rows


def numbers(values: Sequence[int], device: torch.device) -> Tensor:
    """Return `values` as int64 on `device` without synchronization."""
    if is_capturing(device):
        return _written(values, device)
    host = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=device.type != "cpu")
    return host.to(device, non_blocking=True)


def _written(values: Sequence[int], device: torch.device) -> Tensor:
    """Return `values`, passed as launch arguments: a captured copy would read host memory freed since."""
    words = torch.empty(len(values), dtype=torch.int64, device=device)
    for first in range(0, len(values), programs.WORDS):
        chunk = [*values[first : first + programs.WORDS]]
        padding = [0] * (programs.WORDS - len(chunk))
        launch(programs.write_words, 1, words, first, len(chunk), *chunk, *padding)
    return words


def launch(program: Any, count: int, *arguments: Any) -> None:
    """Run `count` instances of `program` on the current device.

    Raises:
        KernelLaunchError: Triton could not compile or launch it.
    """
    try:
        program[(count,)](*arguments, **programs.OPTIONS)
    except Exception as error:  # from Triton, its C compiler or the driver
        raise KernelLaunchError(
            f"Triton could not compile or launch amp-core's {program.fn.__name__}: {type(error).__name__}: "
            f"{error}\nIf Triton or the compiler on this machine is at fault, set {_env.TRITON}=0 to use "
            f"torch's own operations instead."
        ) from error


@functools.cache
def _load_writer(device: torch.device) -> None:
    """Load the program of `_written`, because none can be loaded during a graph capture."""
    _written([0], device)


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of the current device is capturing a graph."""
    if device.type == "cpu":
        return False
    query = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return bool(query()) if query is not None else False


def stream_of(device: torch.device) -> Any:
    """Return the current stream of `device`; None on the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device).current_stream(device)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current, so that Triton launches on it."""
    if device.type == "cpu":
        return nullcontext()
    context: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return context
