"""What a recording shows that a `PrecisionPlan` forbids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from amp_core.common.text import dtype_name
from amp_core.debugging import collectives as c
from amp_core.debugging import stored_dtypes as s
from amp_core.regions.plan import PrecisionPlan
from amp_core.regions.selecting import matches


@dataclass(frozen=True)
class Violation:
    """Something that a recorded run did or kept in a dtype that its plan forbids.

    Attributes:
        what: a collective, such as ``all_reduce of gradients``, or a kind of tensor.
        where: the module, or the tensor's name.
        phase: ``forward`` or ``backward`` for a collective; otherwise empty.
        dtype: its dtype.
        wanted: the narrowest dtype that the plan allows.
        entry: the entry of the plan that says so.
        calls: how often.
    """

    what: str
    where: str
    phase: str
    dtype: str
    wanted: str
    entry: str
    calls: int = 1

    def __str__(self) -> str:
        if self.entry.startswith("float32_"):  # a list of names
            return f"{self.what} {self.where}: {self.dtype}, but {self.entry} names it"
        phase = f" in the {self.phase} pass" if self.phase else ""
        times = f", {self.calls} times" if self.calls > 1 else ""
        return f"{self.what} of {self.where}{phase}: {self.dtype}, but {self.entry} is {self.wanted}{times}"


def violations(
    collectives: Mapping[c.CollectiveKey, c.CollectiveCount],
    tensors: Mapping[s.TensorKey, int],
    plan: PrecisionPlan,
) -> list[Violation]:
    """Return what `plan` forbids of the collectives and tensors of a recording."""
    return [*_of_collectives(collectives, plan), *_of_tensors(tensors, plan)]


def _of_collectives(
    found: Mapping[c.CollectiveKey, c.CollectiveCount], plan: PrecisionPlan
) -> Iterator[Violation]:
    for key, count in found.items():
        entry = _entry_for(key)
        wanted = getattr(plan, entry) if entry else None
        if wanted is not None and _is_narrower(key.dtype, wanted):
            what = f"{key.kind} of {key.of}"
            yield Violation(
                what, str(key.place), key.phase, key.dtype, dtype_name(wanted), entry, count.calls
            )


def _entry_for(key: c.CollectiveKey) -> str:
    """Return the name of the plan's entry on a collective; empty if there is none."""
    if key.of == c.WEIGHTS:
        return "param_dtype"
    if key.kind not in c.REDUCTIONS or key.of == c.OTHER:
        return ""
    return "reduce_dtype" if key.of == c.GRADIENTS else "activation_reduce_dtype"


def _of_tensors(found: Mapping[s.TensorKey, int], plan: PrecisionPlan) -> Iterator[Violation]:
    for key in found:
        entry, wanted = _wanted(key, plan)
        if wanted is not None and _is_narrower(key.dtype, wanted):
            what = f"{key.kind} {key.state}".strip()
            yield Violation(what, key.name, "", key.dtype, dtype_name(wanted), entry)


def _wanted(key: s.TensorKey, plan: PrecisionPlan) -> tuple[str, torch.dtype | None]:
    if key.kind == s.GRADIENT:
        return "grad_dtype", plan.grad_dtype
    if key.kind == s.STATE:
        return "state_dtype", plan.state_dtype
    entry = "float32_parameters" if key.kind == s.PARAMETER else "float32_buffers"
    kept = any(matches(key.name, glob) for glob in getattr(plan, entry))
    return entry, torch.float32 if kept else None


def _is_narrower(name: str, wanted: torch.dtype) -> bool:
    """Return whether a dtype holds less than `wanted`: neither 16-bit format holds all of the other."""
    dtype: torch.dtype = getattr(torch, name)
    if not dtype.is_floating_point or dtype is wanted:
        return False
    return dtype.itemsize <= wanted.itemsize
