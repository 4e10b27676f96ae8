"""Find the op that makes inf or NaN."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_core._torch.dispatcher import Overload, dispatcher_name, has_out, short_name
from amp_core._torch.tensors import part_of
from amp_core._torch.tracing import calls_are_captured
from amp_core.common.identity import WeakIdentityMapping
from amp_core.common.text import dtype_name
from amp_core.debugging.op_kinds import FILLS, numbers_in, results
from amp_core.debugging.places import Lines, Place
from amp_core.debugging.ranges import Extent
from amp_core.debugging.sink import BACKWARD, Sink, Where
from amp_core.debugging.state_keeper import is_rehearsing
from amp_core.debugging.tap import measuring
from amp_core.debugging.values import extent, fills_memory, in_parts, is_readable, wide
from amp_core.errors import NonFiniteError
from amp_core.policy.names import short

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(frozen=True)
class OpFault:
    """The op at which `guard` stopped.

    Attributes:
        step: the training step, from 0.
        phase: ``forward`` or ``backward``.
        place: the model and module.
        op: the op as autocast received it, or the cast.
        kernel: the op that ran.
        line: ``file:line`` of the program that called the op; of a backward op, the line of its forward op.
        rule: the policy rule that decided its dtype, with its origin; empty if none did.
        inputs: the ranges of its inputs, without those that it wrote to; of a complex one, the range of its
            real and imaginary parts.
        result: the range of its result; of several, of the first with inf or NaN.
    """

    step: int
    phase: str
    place: Place
    op: str
    kernel: str
    line: str
    rule: str
    inputs: tuple[Extent, ...]
    result: Extent

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{short(self.op)} in {self.place} makes inf or NaN ({self.phase} pass of step {self.step}).",
                f"  line    {self.line or 'unknown'}",
                f"  rule    {self.rule or 'none: the op ran in the dtypes that it was given'}",
                *(f"  input   {tensor}" for tensor in self.inputs),
                f"  result  {self.result}",
            ]
        )


class FaultFinder(Sink):
    """Raises at the first op that makes inf or NaN, and looks at none after it.

    Args:
        step: the training step that it observes.
        found: called with the fault before the error is raised.

    Attributes:
        masked: whether an op has filled in inf or NaN where a mask says so.
    """

    def __init__(self, step: int, found: Callable[[OpFault], None]) -> None:
        self._step, self._found = step, found
        self._thread = threading.get_ident()
        self._not_finite: WeakIdentityMapping[torch.UntypedStorage, None] = WeakIdentityMapping()
        self._lines = Lines()
        self.masked = self._is_done = False

    @staticmethod
    def seen_in(value: Any) -> list[Tensor]:
        """Return the tensors that may have inf or NaN."""
        return numbers_in(value)

    def cast(self, source: Tensor, result: Tensor, where: Where) -> None:
        """Check a cast."""
        line = self._lines.of_op(where.phase == BACKWARD)
        op = f"the cast to {dtype_name(result.dtype)}"
        self._check(op, "aten::_to_copy", [source], [result], where, line)

    def moved(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:  # noqa: ARG002
        """Note which copies and fills have inf or NaN."""
        self._note(outputs)

    def ran(self, op: Overload, inputs: list[Tensor], outputs: list[Tensor], where: Where) -> None:
        """Check an op."""
        line = self._lines.of_op(where.phase == BACKWARD)
        if short_name(op) in FILLS:  # a mask of -inf is meant
            self.masked |= bool(self._note(outputs))
            return
        kernel = dispatcher_name(op)
        if has_out(op):
            inputs = inputs[: -len(outputs)]
        called = where.frames[0].op if where.frames else kernel
        self._check(called, kernel, inputs, results(kernel, outputs), where, line)

    def _note(self, tensors: list[Tensor]) -> list[Tensor]:
        with measuring():
            bad = []
            for tensor in readable(tensors):
                if extent(in_reals(tensor).reshape(-1))[1]:
                    bad.append(tensor)
                    self._not_finite[tensor.untyped_storage()] = None
                elif fills_memory(tensor):
                    self._not_finite.pop(tensor.untyped_storage(), None)
        return bad

    def _check(
        self, op: str, kernel: str, inputs: list[Tensor], outputs: list[Tensor], where: Where, line: str
    ) -> None:
        if self._is_done:  # the program went on after the error
            return
        with measuring():
            results_by_id = set(map(id, outputs))
            written = readable([t for t in inputs if id(t) in results_by_id])
            given = any(t.untyped_storage() in self._not_finite for t in written)
            read = readable([t for t in inputs if id(t) not in results_by_id])
            bad = self._note(outputs)
            if not bad or given or is_rehearsing(self._thread) or not self._is_new(read, bad[0]):
                return
            rule, origin = where.cause or ("", "")
            fault = OpFault(
                step=self._step,
                phase=where.phase,
                place=where.place,
                op=op,
                kernel=kernel,
                line=line,
                rule=f"{rule} ({origin})" if rule else "",
                inputs=tuple(map(Extent.of, read)),
                result=Extent.of(bad[0]),
            )
        self._is_done = True
        self._found(fault)
        raise NonFiniteError(str(fault), fault)

    @staticmethod
    def _is_new(read: list[Tensor], result: Tensor) -> bool:
        """Return whether the op made inf of finite numbers, or NaN of numbers."""
        nan = bool(in_reals(result).isnan().any())
        reals = map(in_reals, read)
        return not any(bool(t.isnan().any()) if nan else not bool(t.isfinite().all()) for t in reals)


def readable(tensors: list[Tensor]) -> list[Tensor]:
    """Return what can be read: of a DTensor this rank's part, of a sparse or nested tensor its values."""
    return [*filter(is_readable, (_values(part_of(tensor)) for tensor in tensors))]


def _values(tensor: Tensor) -> Tensor:
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor
    if not (tensor.is_nested or tensor.layout in _SPARSE) or calls_are_captured():
        return tensor
    with torch.no_grad():
        return (tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor).values()


def in_reals(tensor: Tensor) -> Tensor:
    """Return the values, of a complex tensor those of its parts, in a dtype that can be checked."""
    return wide(in_parts(tensor.detach()))


def have_nan(tensors: list[Tensor]) -> bool:
    """Return whether one of the tensors that can be read has a NaN."""
    with measuring():
        return any(bool(in_reals(t).isnan().any()) for t in readable(tensors))
