"""How the values of two runs of one step differ, on one rank or on all."""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from amp_core.debugging.capture import PARAMETER, Key, Run, Sample
from amp_core.debugging.op_kinds import FILLS
from amp_core.debugging.places import Place
from amp_core.debugging.tap import measuring


@dataclass(frozen=True)
class Difference:
    """How one value of the mixed-precision run differs from the reference.

    Attributes:
        key: identifies the value.
        order: its position in the order of computation.
        dtype: its dtype in mixed precision.
        error: norm of the difference over norm of the reference, or 1 if only the reference is 0; inf if
            finite values became inf or NaN.
        given: the largest error among the inputs of its op.
        added: the error that the op adds, ``error - given``; inf if it turned finite values into inf or NaN.
        overflow: share of its values that are inf or NaN although the reference is finite.
        underflow: share of its values that are 0 because the reference is too small for `dtype`.
        largest: the largest finite magnitude of the reference, with the loss scale of the mixed run.
        random: whether the op draws random numbers, which may differ between dtypes.
        noise: whether the reference is only rounding noise left by canceling larger float32 numbers.
        size: norm of the finite values of the reference.
        distance: norm of the difference, where both are finite.
        line: ``file:line`` of the program that called the op, or the forward op of a backward op.
    """

    key: Key
    order: int
    dtype: torch.dtype
    error: float
    given: float
    added: float
    overflow: float
    underflow: float
    largest: float
    random: bool
    noise: bool
    size: float
    distance: float
    line: str = ""


_NOISE = 1e-5  # about 100 times float32's eps
_WITHOUT_SUMS = (
    *("mul", "div", "square", "pow", "sqrt", "rsqrt", "reciprocal", "exp", "sigmoid", "tanh", "relu"),
    *("clamp", "clamp_min", "clamp_max", "where", "masked_fill"),
    *("maximum", "minimum", "max", "min", "amax", "amin"),
    *("softmax", "_softmax", "_safe_softmax", "scaled_dot_product_attention"),
)
"""Ops whose result is small beside their inputs without canceling, as beside what fills a mask."""


class Found(NamedTuple):
    """What one rank found, or all of them."""

    differences: dict[Key, Difference]
    parents: dict[Key, tuple[Key, ...]]
    losses: tuple[float | None, float | None]
    work: Counter[tuple[Place, str]]

    @classmethod
    def of(cls, reference: Run, mixed: Run) -> Found:
        """Compare what two runs of this rank recorded."""
        parents = {key: sample.parents for key, sample in mixed.samples.items()}
        return cls(_differences(reference, mixed), parents, (mixed.loss, reference.loss), mixed.work)

    @staticmethod
    def merged(parts: list[Found]) -> Found:
        """Join what the ranks found: the worst of each value, and the mean loss."""
        found: dict[Key, list[Difference]] = {}
        parents: dict[Key, dict[Key, None]] = {}
        for part in parts:
            for key, difference in part.differences.items():
                found.setdefault(key, []).append(difference)
            for key, above in part.parents.items():
                parents.setdefault(key, {}).update(dict.fromkeys(above))
        return Found(
            {key: _largest(differences) for key, differences in found.items()},
            {key: tuple(above) for key, above in parents.items()},
            (_mean([part.losses[0] for part in parts]), _mean([part.losses[1] for part in parts])),
            functools.reduce(operator.or_, [part.work for part in parts]),  # the largest of each
        )


_MEASURES = ("error", "given", "added", "overflow", "underflow", "largest", "size", "distance")


def _largest(differences: list[Difference]) -> Difference:
    """Return the differences that ranks found at one value as one."""
    return replace(
        differences[0],
        **{name: max(getattr(each, name) for each in differences) for name in _MEASURES},
        random=any(each.random for each in differences),
        noise=all(each.noise for each in differences),
    )


def _mean(losses: list[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if known else None


def _differences(reference: Run, mixed: Run) -> dict[Key, Difference]:
    differences: dict[Key, Difference] = {}
    for order, (key, sample) in enumerate(mixed.samples.items()):
        wanted = reference.samples.get(key)
        if wanted is not None and wanted.shape == sample.shape:
            differences[key] = _difference(key, order, wanted, sample, differences)
    return differences


@measuring()
@torch.no_grad()
def _difference(
    key: Key, order: int, wanted: Sample, sample: Sample, known: Mapping[Key, Difference]
) -> Difference:
    exact, values = wanted.values.cpu().double(), sample.values.cpu().double()  # some devices have no float64
    lost = exact.isfinite() & ~values.isfinite()
    overflows = bool(lost.any()) or sample.not_finite > wanted.not_finite
    away, whole = _norms(values, exact)
    error = math.inf if overflows else _ratio(away, whole)
    parents = [known[p] for p in sample.parents if p in known]
    given = max((parent.error for parent in parents), default=0.0)
    norm = float(exact[exact.isfinite()].norm())
    kept = math.sqrt(math.prod(sample.shape) / max(1, exact.numel()))
    size = norm * kept
    noise = not overflows and _is_noise(key, size, parents)
    return Difference(
        key,
        order,
        sample.dtype,
        error,
        given,
        0.0 if noise or given == math.inf else max(0.0, error - given),
        _overflow_share(lost, wanted, sample) if overflows else 0.0,
        _underflow_share(exact, values, sample.dtype),
        wanted.largest,
        wanted.random or sample.random,
        noise,
        size,
        away * kept,
        sample.line,
    )


def _is_noise(key: Key, size: float, parents: list[Difference]) -> bool:
    """Return whether the reference is only rounding noise left by canceling float32 numbers.

    For example, the gradient of a bias before a normalization is 0, but computed as a sum of nonzero numbers.
    """
    if key.level == PARAMETER:
        return any(parent.noise or size < _NOISE * parent.size for parent in parents)
    sums = _short(key).rstrip("_") not in _WITHOUT_SUMS
    return sums and size < _NOISE * max((parent.size for parent in parents), default=0.0)


def _short(key: Key) -> str:
    return key.name.partition("::")[2].partition(".")[0]


def _norms(values: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the norms of the difference and of the reference, where both are finite."""
    finite = exact.isfinite() & values.isfinite()
    zero = torch.zeros((), dtype=exact.dtype, device=exact.device)
    away, whole = (torch.where(finite, each, zero).norm() for each in (values - exact, exact))
    return float(away), float(whole)


def _ratio(away: float, whole: float) -> float:
    return away / whole if whole else float(away > 0)


def _overflow_share(lost: Tensor, wanted: Sample, sample: Sample) -> float:
    more = sample.not_finite - wanted.not_finite  # the elements that were kept may have none of them
    return max(float(lost.double().mean()), more / math.prod(sample.shape))


def _underflow_share(exact: Tensor, values: Tensor, dtype: torch.dtype) -> float:
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the smallest subnormal number
    gone = (values == 0) & (exact != 0) & (exact.abs() < smallest)
    return float(gone.double().mean()) if gone.numel() else 0.0


def first_fault(run: Run, known: Mapping[Key, Difference]) -> tuple[bool, Difference | None]:
    """Return whether loss and gradients of `run` are finite, and of the `known` ops the first to blame.

    What a mask fills in is not to blame, but what makes NaN of it.
    """
    bad = set[Key]()
    for key, sample in run.samples.items():
        if sample.not_finite and (_short(key) not in FILLS or bad.intersection(sample.parents)):
            bad.add(key)
    pending = [key for key in bad if key.level == PARAMETER]
    loss_is_finite = run.loss is None or math.isfinite(run.loss)
    if loss_is_finite and not pending:
        return True, None
    if not loss_is_finite and run.loss_producer in bad:
        pending.append(run.loss_producer)
    first, seen = None, set(pending)
    while pending:
        key = pending.pop()
        above = bad.intersection(run.samples[key].parents)
        if not above and key in known and (first is None or known[key].order < first.order):
            first = known[key]
        pending += above - seen
        seen |= above
    return False, first


def scalar_error(value: float | None, exact: float | None) -> float:
    """Return the relative error of a loss: inf if only `value` is not finite, 0 if either is unknown."""
    if value is None or exact is None or not math.isfinite(exact):
        return 0.0
    if not math.isfinite(value):
        return math.inf
    return abs(value - exact) / abs(exact) if exact else float(value != 0)
