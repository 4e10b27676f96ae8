"""What is remembered of each step. Nothing here waits for the device until somebody reads it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class BadParameter:
    """A parameter whose gradient held an inf or a NaN, and in how many elements."""

    name: str
    nonfinite: int
    elements: int


@dataclass
class StepRecord:
    """One `GradScaler.step`. Reading a property waits for the device, once; making the record does not.

    Attributes:
        number: the count of `GradScaler.update` calls before it.
        optimizer: the optimizer's class name.
    """

    number: int
    optimizer: str
    _found_inf: Tensor
    _scale_before: Tensor
    _scale_after: Tensor | None = None
    _total_norm: Tensor | None = None
    _params: Sequence[str] = field(default=(), repr=False)
    _nonfinite: Tensor | None = field(default=None, repr=False)
    _bad: tuple[BadParameter, ...] | None = None

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped because a gradient was not finite."""
        return bool(self._found_inf.item())

    @property
    def scale_before(self) -> float:
        """The scale that the gradients had."""
        return float(self._scale_before.item())

    @property
    def scale_after(self) -> float | None:
        """The scale after the `update` that followed; ``None`` before it."""
        return None if self._scale_after is None else float(self._scale_after.item())

    @property
    def total_norm(self) -> float | None:
        """The norm of the true gradients before clipping; ``None`` where none was asked for."""
        return None if self._total_norm is None else float(self._total_norm.item())

    @property
    def bad_parameters(self) -> tuple[BadParameter, ...]:
        """The parameters whose gradients held an inf or a NaN; empty where the step was taken."""
        return self._bad or ()

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for a log."""
        return {
            "number": self.number,
            "optimizer": self.optimizer,
            "skipped": self.skipped,
            "scale_before": self.scale_before,
            "scale_after": self.scale_after,
            "total_norm": self.total_norm,
            "bad_parameters": [vars(b) for b in self.bad_parameters],
        }


class History(Sequence[StepRecord]):
    """The last steps, oldest first; older ones are let go."""

    def __init__(self, size: int) -> None:
        self._records: deque[StepRecord] = deque(maxlen=size)

    def append(self, record: StepRecord) -> None:
        """Add the newest."""
        self._records.append(record)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._records)

    def __getitem__(self, index: Any) -> Any:
        return list(self._records)[index] if isinstance(index, slice) else self._records[index]

    @property
    def skipped(self) -> list[StepRecord]:
        """The steps that were skipped."""
        return [record for record in self._records if record.skipped]

    def plot(self, path: str | Path) -> None:
        """Draw the scale and the skipped steps into a picture; waits for the device.

        Args:
            path: where it goes; the suffix gives the format (png, svg, pdf ...).

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: there are no steps yet.
        """
        from amp_core.scaler.plot import save_scale

        if not self._records:
            raise ValueError("The history is empty: no step was taken or skipped since the scaler was made.")
        scales = {record.number: record.scale_before for record in self._records}
        save_scale(scales, sorted({record.number for record in self.skipped}), path)


def bad_parameters(
    params: Sequence[Tensor], grads: Sequence[Tensor], names: Mapping[int, str]
) -> tuple[BadParameter, ...]:
    """Count the non-finite elements of each gradient; waits for the device."""
    found = []
    for param, grad in zip(params, grads, strict=True):
        count = int((~grad.detach().isfinite()).sum().item())
        if count:
            name = names.get(id(param), f"parameter of shape {tuple(param.shape)}")
            found.append(BadParameter(name, count, grad.numel()))
    return tuple(found)
