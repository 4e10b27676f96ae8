"""What ranks exchange: which collective, of what, in which dtype."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from amp_core._torch.autograd import at_weight_gradients
from amp_core._torch.dispatcher import Overload
from amp_core.common.containers import tensors_in
from amp_core.debugging.places import Place

WEIGHTS, GRADIENTS = "weights", "gradients"
ACTIVATIONS, ACTIVATION_GRADIENTS, OTHER = "activations", "activation gradients", "other"
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")

_IN_PLACE = "c10d"
_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
_KINDS = {
    kind.replace("_", ""): kind
    for kind in (
        *("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"),
        *("reduce", "scatter", "gather", "send", "recv"),
    )
}


class CollectiveKey(NamedTuple):
    """The key by which collectives are counted.

    Attributes:
        phase: ``forward`` (all that is not in a backward pass) or ``backward``.
        place: the module whose op communicates; outside modules for what FSDP does between them.
        kind: what it does, such as ``all_reduce``, however torch calls it.
        of: ``weights`` that FSDP2 gathers, ``gradients`` of weights, ``activations``,
            ``activation gradients``, or ``other``: outside modules and backward passes.
        dtype: the dtype that travels and, in a reduction, is added up.
    """

    phase: str
    place: Place
    kind: str
    of: str
    dtype: str


@dataclass
class CollectiveCount:
    """How many collectives there were.

    Attributes:
        calls: their number.
        nbytes: the bytes that this rank contributed.
    """

    calls: int = 0
    nbytes: int = 0


@functools.cache
def kind_of(op: Overload) -> str | None:
    """Return the kind of collective that `op` is; None if it is none."""
    if op.namespace != _IN_PLACE and op.namespace not in _FUNCTIONAL:
        return None
    name = op.overloadpacket.__name__.replace("_", "")
    return next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)


def given(op: Overload, args: tuple[Any, ...]) -> list[Tensor]:
    """Return what this rank contributes: ops in place often name their outputs first."""
    second = args[1] if op.namespace == _IN_PLACE and len(args) > 1 else ()
    return [*tensors_in(second)] or [*tensors_in(args[:1])]


class Collectives:
    """Tells what the collectives of a thread are for."""

    def __init__(self) -> None:
        self._gathered = 0  # the memory into which FSDP2 has copied the shards that it gathers next

    def note(self, op: Overload, result: Any) -> None:
        """Remember what FSDP2 is about to gather."""
        if op.namespace == "fsdp" and "all_gather_copy_in" in op.overloadpacket.__name__:
            self._gathered = next((t.untyped_storage().data_ptr() for t in tensors_in(result)), 0)

    def purpose(self, inputs: list[Tensor], backward: bool, in_module: bool) -> str:
        """Return what a collective moves, as in `CollectiveKey`."""
        if self._gathered and any(t.untyped_storage().data_ptr() == self._gathered for t in inputs):
            return WEIGHTS
        if not backward:
            return ACTIVATIONS if in_module else OTHER
        return GRADIENTS if at_weight_gradients() else ACTIVATION_GRADIENTS
