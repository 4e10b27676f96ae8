"""Tables on the device that tell Triton programs where many tensors lie, built without waiting for it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from amp_core.common import environment as _env
from amp_core.errors import KernelLaunchError
from amp_core.kernels import triton_programs as programs

_REMEMBERED = 64
"""Lists of shapes whose rows are kept: some models, their weights and gradients."""

_RECENT = 4
"""Lists of addresses that are kept for each list of shapes: gradients, weights, their casts."""

_for_replay: list[Any] = []
"""Tables that a captured graph reads at each replay. Nobody tells when a graph is gone, so they stay: 8 bytes
a tensor, and 16 a chunk of 16384 elements where its shapes were new to amp-core."""


@dataclass(frozen=True)
class Group:
    """Rows of tensors of one kind, which one launch takes."""

    kind: Any
    first: int
    count: int


class Rows:
    """How the tensors of a list are cut, whatever their addresses.

    Attributes:
        sizes: int64, shape ``(n,)``: elements of each tensor.
        first, end: int64, shape ``(n,)``: the rows of each tensor.
        tensor, start: int64, shape ``(count,)``: each row's tensor, and its first element in it.
        groups: the rows of each kind of tensor.
        captured: they were made while a graph was captured, so they have no contents before a replay.
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
        # Each begins at a multiple of 16 bytes: Triton compiles anew for an address that is none.
        padded = [[*part, *[0] * (n % 2)] for part in (sizes, first, end, order, counts)]
        told = numbers(list(chain.from_iterable(padded)), device)
        self.sizes, self.first, self.end, ordered, counted = (t[:n] for t in told.view(5, -1).unbind())
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
        """Return the addresses of `tensors`, which must be of these sizes, on their device.

        Those of the last calls are kept: a caching allocator gives the gradients of one step the places
        of those of the step before.
        """
        device, there = self.sizes.device, list(map(Tensor.data_ptr, tensors))
        stream, capturing = stream_of(device), is_capturing(device)
        if not capturing:
            self._follow(stream)
        # What was written before a capture began is there for every stream: its beginning waits for all.
        known = [told for at, on, told in self._recent if (capturing or on == stream) and at == there]
        told = known[0] if known else numbers(there, device)
        if capturing:
            _for_replay.append((self, told))
        elif not known:
            self._recent = [(there, stream, told), *self._recent[: _RECENT - 1]]
        return told

    def _follow(self, stream: Any) -> None:
        """Make the rows ready for another stream than the one that wrote them."""
        if stream != self._stream:
            stream.wait_event(self._written)  # not for what that stream was given since
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


_remembered: dict[Hashable, Rows] = {}
_lock = threading.Lock()


def rows_of(kinds: tuple[Hashable, ...], sizes: tuple[int, ...], device: torch.device) -> Rows:
    """Return the rows of tensors of such kinds and sizes on `device`; the same ones at the next call."""
    key = (device, kinds, sizes)
    with _lock:
        found = _remembered.pop(key, None) or Rows(kinds, sizes, device)
        if not found.captured:
            _remembered[key] = found
            while len(_remembered) > _REMEMBERED:
                del _remembered[next(iter(_remembered))]
    return found


def numbers(values: Sequence[int], device: torch.device) -> Tensor:
    """Return `values` as int64 on `device`, without waiting for it."""
    if is_capturing(device):
        return _written(values, device)
    here = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=device.type != "cpu")
    return here.to(device, non_blocking=True)


def _written(values: Sequence[int], device: torch.device) -> Tensor:
    """Return `values`, carried by launches: a captured copy would read host memory that is long gone."""
    there = torch.empty(len(values), dtype=torch.int64, device=device)
    for first in range(0, len(values), programs.WORDS):
        some = [*values[first : first + programs.WORDS]]
        rest = [0] * (programs.WORDS - len(some))
        launch(programs.write_words, 1, there, first, len(some), *some, *rest)
    return there


def launch(program: Any, count: int, *arguments: Any) -> None:
    """Run `count` instances of `program` on the current device.

    Raises:
        KernelLaunchError: Triton cannot compile or launch it.
    """
    try:
        program[(count,)](*arguments, **programs.OPTIONS)
    except Exception as error:  # of Triton, its C compiler, the driver
        raise KernelLaunchError(
            f"Triton could not compile or launch amp-core's {program.fn.__name__}: {type(error).__name__}: "
            f"{error}\nIf that is a fault of the Triton or compiler on this machine, set {_env.TRITON}=0: "
            f"torch's own operations then do the same."
        ) from error


@functools.cache
def _load_writer(device: torch.device) -> None:
    """Load the program of `_written`: no program can be loaded while a graph is captured."""
    _written([0], device)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of the current device is being captured in a graph."""
    if device.type == "cpu":
        return False
    asked = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return bool(asked()) if asked is not None else False


def stream_of(device: torch.device) -> Any:
    """Return the current stream of `device`; None on the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device).current_stream(device)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one, on which Triton launches."""
    if device.type == "cpu":
        return nullcontext()
    context: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return context
