"""What a `Tap` reports, and to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_core._torch.dispatcher import Overload
from amp_core.debugging.op_kinds import floats_in
from amp_core.debugging.places import Place
from amp_core.dispatch.quantized_products import ScaledProduct

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Frame:
    """A call of an op that may have an autocast rule on some device.

    Attributes:
        op: its full name.
        given: the floating-point dtypes of its inputs, before any cast.
        rule: the rule of the active policy; with a threshold, followed by the work of this call.
        origin: the origin of that rule.
    """

    op: str
    given: tuple[torch.dtype, ...]
    rule: str
    origin: str


@dataclass(frozen=True)
class Where:
    """The context of a call.

    Attributes:
        phase: `FORWARD` or `BACKWARD`.
        place: the module.
        frames: the enclosing autocast frames, outermost first.
        module_rule: rule and origin of the whole module's rule, if any, or of the forward op.
        formats: the element formats of the operands, if a recipe quantised them.
    """

    phase: str
    place: Place
    frames: tuple[Frame, ...]
    module_rule: tuple[str, str] | None = None
    formats: str = ""

    @property
    def cause(self) -> tuple[str, str] | None:
        """Rule and origin of the innermost frame with an effective rule, or else of the module."""
        ruled = (f for f in reversed(self.frames) if f.rule != "unchanged")
        return next(((f.rule, f.origin) for f in ruled), self.module_rule)


class Sink:
    """Receives the observed ops; by default it ignores them."""

    @staticmethod
    def seen_in(value: Any) -> list[Tensor]:
        """Return those tensors in the arguments or the result of an op that `moved` and `ran` receive."""
        return floats_in(value)

    def cast(self, source: Tensor, result: Tensor, where: Where, /) -> None:
        """Receive a conversion from one floating-point dtype to another."""

    def moved(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Receive an op that only copies or creates such tensors."""

    def ran(self, op: Overload, inputs: list[Tensor], outputs: list[Tensor], where: Where) -> None:
        """Receive an op that computes such results from such inputs, except casts."""

    def framed(self, frame: Frame, inputs: list[Tensor], outputs: list[Tensor], where: Where) -> None:
        """Receive an op with a frame after it returns; `where` is its context."""

    def multiplied(self, product: ScaledProduct, where: Where, /) -> None:
        """Receive a product of quantised operands, before `ran` receives it as an op."""

    def communicated(
        self, kind: str, of: str, inputs: list[Tensor], outputs: list[Tensor], where: Where
    ) -> None:
        """Receive a collective: `kind` and `of` as in `CollectiveKey`. The outputs may not be there yet."""
