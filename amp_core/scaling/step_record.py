"""Records of steps. They hold tensors on the device; only reading them waits."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex, overload

import torch
from torch import Tensor

from amp_core._torch.tensors import numbers
from amp_core.common.files import as_path
from amp_core.common.text import counted


@dataclass(frozen=True)
class BadParameter:
    """A parameter whose gradient held an inf or a NaN.

    Attributes:
        name: its name in ``named_parameters``, or its shape.
        nonfinite: the number of such elements; ``None`` if the device decided and they were not counted.
        elements: the number of its elements.
    """

    name: str
    nonfinite: int | None
    elements: int


@dataclass(repr=False, slots=True)
class StepRecord:
    """The record of one `GradScaler.step`. ``print(record)`` shows it in one line.

    Creating a record does not wait for the device; reading it for the first time does.

    Attributes:
        number: the number of `GradScaler.update` calls before the step.
        optimizer: the optimizer's class name. Further optimizers of one class and scale have a number, such
            as ``Adam_2``, in the order of their first steps.
        key: the key of the loss scale; ``None`` for the scale of losses without a key.
    """

    number: int
    optimizer: str
    _found_inf: Tensor | float
    _scale_before: Tensor | float
    _scale_after: Tensor | float | None = None
    _total_norm: Tensor | float | None = None
    _params: Sequence[tuple[str, int]] = ()
    _nonfinite: Tensor | list[float] | None = None
    _micro_batches: Tensor | list[float] | None = None
    _left_out: bool = False
    _bad: tuple[BadParameter, ...] | None = None
    _rank: int | None = None
    key: str | None = None
    _lost: Mapping[str, Tensor] | None = None
    _device: torch.device | str = "cpu"

    @property
    def landed(self) -> Tensor:
        """Whether the step was taken: a 0-dim bool tensor on the device of the scale; does not wait."""
        if isinstance(self._found_inf, Tensor):
            return self._found_inf == 0
        return torch.full((), not self._found_inf, dtype=torch.bool, device=self._device)

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped because a gradient was not finite."""
        self._found_inf = float(self._found_inf)
        return bool(self._found_inf)

    @property
    def scale_before(self) -> float:
        """The scale of the gradients."""
        return float(self._scale_before)

    @property
    def scale_after(self) -> float | None:
        """The scale after the following `update`; ``None`` until then."""
        return None if self._scale_after is None else float(self._scale_after)

    @property
    def total_norm(self) -> float | None:
        """The norm of the unscaled gradients before clipping; ``None`` if the step did not clip."""
        return None if self._total_norm is None else float(self._total_norm)

    @property
    def bad_parameters(self) -> tuple[BadParameter, ...]:
        """The parameters whose gradients held an inf or a NaN.

        For a step that was taken, these come from the micro-batches that were left out of it.
        """
        if self._bad is None and self._nonfinite is not None:
            flags = _values(self._nonfinite)
            self._bad = tuple(
                BadParameter(name, None, elements)
                for (name, elements), flag in zip(self._params, flags, strict=True)
                if flag
            )
        return self._bad or ()

    @property
    def bad_micro_batches(self) -> tuple[int, ...]:
        """Indices of the micro-batches in the `AccumulationWindow` that held an inf or a NaN."""
        return tuple(i for i, flag in enumerate(_values(self._micro_batches)) if flag)

    @property
    def lost_updates(self) -> dict[str, float] | None:
        """The share of each parameter's elements that the step should have changed but did not.

        ``None`` if the step was skipped, and unless they are counted: by ``amp_core.count_lost_updates`` or
        ``amp_core.master_weights(..., lost_updates=True)``.
        """
        if self._lost is None or self.skipped:
            return None
        return {name: float(share) for name, share in self._lost.items()}

    @property
    def rank(self) -> int | None:
        """Rank of this process in ``torch.distributed``; ``None`` if that is not initialised."""
        if self._rank is None:
            self._rank = rank()
        return self._rank

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, for logs and JSON."""
        return {
            "number": self.number,
            "optimizer": self.optimizer,
            "key": self.key,
            "rank": self.rank,
            "skipped": self.skipped,
            "scale_before": self.scale_before,
            "scale_after": self.scale_after,
            "total_norm": self.total_norm,
            "bad_micro_batches": list(self.bad_micro_batches),
            "bad_parameters": [vars(b) for b in self.bad_parameters],
            "lost_updates": self.lost_updates,
        }

    def __str__(self) -> str:
        parts = ", ".join(map(str, self.bad_micro_batches))
        if not (self.skipped or parts):
            norm = "" if self.total_norm is None else f", norm {self.total_norm:.4g}"
            return f"{self._whose} took step {self.number} at scale {self.scale_before:g}{norm}"
        where = f"at scale {self.scale_before:g} in {worst(self)}"
        if self.skipped and self._left_out and 0 in _values(self._micro_batches):
            left = f"; left micro-batch {parts} out" if parts else ""
            return f"{self._whose} skipped step {self.number}: inf or NaN in the sum {where}{left}"
        if self.skipped:
            within = f" in micro-batch {parts}" if parts else ""
            return f"{self._whose} skipped step {self.number}: inf or NaN{within} {where}"
        return f"{self._whose} left micro-batch {parts} out of step {self.number}: inf or NaN {where}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    @property
    def _whose(self) -> str:
        of = f" (scale {self.key!r})" if self.key is not None else ""
        on = f" on rank {self.rank}" if self.rank is not None else ""
        return f"{self.optimizer}{of}{on}"


def worst(record: StepRecord) -> str:
    """Describe the first five bad parameters of the record."""
    named = [
        b.name if b.nonfinite is None else f"{b.name} ({b.nonfinite} of {b.elements})"
        for b in record.bad_parameters
    ]
    more = f" and {len(named) - 5} more" if len(named) > 5 else ""
    return ", ".join(named[:5]) + more or _nowhere(record)


def _nowhere(record: StepRecord) -> str:
    if record.rank is not None:
        return "no parameter of this rank"
    known = record._bad is not None  # another optimizer that steps as one with this one
    return f"no parameter of this {record.optimizer}" if known else "parameters that are not known"


_ON_DEVICE = ("_found_inf", "_scale_before", "_scale_after", "_total_norm", "_nonfinite", "_micro_batches")


def fetch(records: Sequence[StepRecord]) -> None:
    """Copy everything in `records` to the host at once, so that reading them no longer waits."""
    pending = [
        (record, name, value)
        for record in records
        for name in _ON_DEVICE
        if isinstance(value := getattr(record, name), Tensor)
    ]
    if not pending:
        return
    device = pending[0][2].device
    wide = any(value.dtype is torch.float64 for _, _, value in pending)
    dtype = torch.float64 if wide else torch.float32
    flat = [value.detach().reshape(-1).to(device, dtype) for _, _, value in pending]
    values = iter(numbers(torch.cat(flat)))
    for record, name, value in pending:
        own = [next(values) for _ in range(value.numel())]
        setattr(record, name, own if value.dim() else own[0])


def _values(flags: Tensor | list[float] | None) -> list[float]:
    return numbers(flags) if isinstance(flags, Tensor) else flags or []


def rank() -> int | None:
    """Return the rank of this process in ``torch.distributed``; ``None`` if that is not initialised."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return None


class History(Sequence[StepRecord]):
    """The last steps, oldest first. ``print(history)`` lists those that were skipped or left something out.

    Example::

        for record in scaler.history.skipped:
            print(record)
    """

    def __init__(self, size: int | None) -> None:
        self._records: deque[StepRecord] = deque(maxlen=None if size is None else min(size, sys.maxsize))
        self._dropped: StepRecord | None = None  # by the last step, which may raise yet

    @property
    def size(self) -> int | None:
        """The number of steps that are kept; ``None`` for all."""
        return self._records.maxlen

    def append(self, record: StepRecord) -> None:
        """Add a step; the oldest is dropped if the history is full."""
        records = self._records
        self._dropped = records[0] if records and len(records) == records.maxlen else None
        records.append(record)

    def remove(self, record: StepRecord) -> None:
        """Take out a step; the one that was dropped for the last comes back."""
        for place in range(len(self._records) - 1, -1, -1):  # other optimizers may have stepped since
            if self._records[place] is record:
                del self._records[place]
                if self._dropped is not None:
                    self._records.appendleft(self._dropped)
                    self._dropped = None
                return

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(list(self._records))  # another thread may step meanwhile

    @overload
    def __getitem__(self, index: SupportsIndex) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> StepRecord | list[StepRecord]:
        return list(self._records)[index] if isinstance(index, slice) else self._records[index]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {counted(len(self), 'step')}>"

    def __str__(self) -> str:
        skipped = self.skipped
        told = [r for r in self if r.skipped or r.bad_micro_batches]
        return "\n".join([f"{counted(len(self), 'step')}, {len(skipped)} skipped", *map(str, told)])

    @property
    def skipped(self) -> list[StepRecord]:
        """The steps that were skipped."""
        records = list(self._records)
        fetch(records)
        return [record for record in records if record.skipped]

    def plot(self, path: str | Path) -> None:
        """Plot the scale of each key and the skipped steps into a file; waits for the device.

        Args:
            path: the file; its suffix gives the format (png, svg, pdf ...).

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the history or `path` is empty.
            TypeError: `path` is no path.
        """
        from amp_core.scaling.plot import save_scales

        if not self._records:
            raise ValueError("The history is empty: the scaler has not taken or skipped a step yet.")
        fetch(self._records)
        scales: dict[str | None, dict[int, float]] = {}
        skipped: dict[str | None, list[int]] = {}
        for record in self._records:
            scales.setdefault(record.key, {})[record.number] = record.scale_before
            marks = skipped.setdefault(record.key, [])
            if record.skipped and record.number not in marks[-1:]:
                marks.append(record.number)
        save_scales(scales, skipped, as_path(path))


def count_nonfinite(
    params: Sequence[Tensor], grads: Sequence[Tensor], names: Mapping[int, str]
) -> tuple[BadParameter, ...]:
    """Count the non-finite elements of each gradient; waits for the device."""
    bad = []
    for param, grad in zip(params, grads, strict=True):
        count = _nonfinite(grad.detach())
        if count:
            sparse = param.grad is not None and param.grad.is_sparse  # of such, `grad` has some rows only
            elements = param.numel() if sparse else grad.numel()
            bad.append(BadParameter(name_of(param, names), count, elements))
    return tuple(bad)


_COUNTED = 2**22
"""So many elements are looked at at a time: there may be no memory for flags of a whole gradient."""


def _nonfinite(grad: Tensor) -> int:
    pieces: Sequence[Tensor] = [grad]
    if grad.numel() > _COUNTED:
        dim = max(range(grad.dim()), key=grad.shape.__getitem__)
        pieces = torch.split(grad, max(1, _COUNTED * grad.shape[dim] // grad.numel()), dim)
    return int(sum((~piece.isfinite()).sum() for piece in pieces))


def name_of(param: Tensor, names: Mapping[int, str]) -> str:
    """Return the name of `param`, or its shape if it has none."""
    return names.get(id(param)) or f"parameter of shape {tuple(param.shape)}"
