"""What a recording counts: ops and casts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from amp_core.debugging.op_kinds import is_low
from amp_core.debugging.places import Place


class OpKey(NamedTuple):
    """The key by which calls of an op are counted.

    Attributes:
        phase: ``forward`` or ``backward``.
        place: the model and module.
        op: the op as autocast received it, such as ``aten::linear.default``; otherwise the same as `kernel`.
        kernel: the op that ran, such as ``aten::addmm``.
        given: the floating-point input dtypes of `op`, before casts.
        dtypes: the floating-point input dtypes of `kernel`.
        result: the dtype of its result.
        rule: the policy rule that applied to `op`; empty if none did.
        origin: the origin of that rule.
    """

    phase: str
    place: Place
    op: str
    kernel: str
    given: str
    dtypes: str
    result: str
    rule: str
    origin: str

    @property
    def widened(self) -> bool:
        """Whether the op ran in float32 although some of its inputs were in low precision."""
        if self.rule.startswith("recipe "):
            return False
        low = any(is_low(getattr(torch, name)) for name in self.given.split("+"))
        return low and self.result == "float32"


class CastKey(NamedTuple):
    """The key by which casts are counted.

    Attributes:
        phase: ``forward`` or ``backward``.
        place: the model and module.
        cause: the op that needed the cast; empty if there was none.
        source: the dtype of the tensor that was cast.
        result: the dtype of the cast.
        weight: the name of the tensor, if it is a parameter or buffer of a module; else empty.
        rule: the policy rule that applied to `cause`; empty if none did.
        origin: the origin of that rule.
    """

    phase: str
    place: Place
    cause: str
    source: str
    result: str
    weight: str
    rule: str
    origin: str


@dataclass
class CastCount:
    """How many casts there were.

    Attributes:
        calls: their number.
        nbytes: the bytes that they wrote.
        repeats: how many of them, in forward passes, were of a tensor cast before and unchanged since.
        repeated_bytes: the bytes that these wrote.
    """

    calls: int = 0
    nbytes: int = 0
    repeats: int = 0
    repeated_bytes: int = 0
