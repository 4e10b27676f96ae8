"""The report for `Comparison`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from amp_core.common.text import counted, dtype_name
from amp_core.debugging.capture import MODULE, OP, PARAMETER, Key
from amp_core.debugging.chart import Chart, Point
from amp_core.debugging.comparison import Comparison, tolerances
from amp_core.debugging.difference import Difference
from amp_core.debugging.format_tables import format_tables
from amp_core.debugging.report import content_of
from amp_core.debugging.sink import BACKWARD, FORWARD
from amp_core.debugging.tables import Content, Table, Value, as_count, as_share, columns, written
from amp_core.policy.names import short

_PASS = {FORWARD: "activation", BACKWARD: "gradient"}
_FIGURES = (
    "error=relative error, added=added here, dtype, overflow=inf or NaN, underflow, "
    "largest=largest (reference), order"
)


@content_of.register
def _(comparison: Comparison) -> Content:
    return Content(
        f"{dtype_name(comparison.dtype)} against {dtype_name(comparison.reference_dtype)}",
        _facts(comparison),
        _notes(comparison),
        [
            _ops(comparison.at(OP)),
            _modules(comparison.at(MODULE)),
            _parameters(comparison.at(PARAMETER)),
            *(format_tables(comparison) if comparison.quantized else []),
        ],
        charts=_charts(comparison),
    )


def _charts(comparison: Comparison) -> list[Chart]:
    ops = [d for d in comparison.differences if d.key.level == OP and not d.noise]
    name, info = dtype_name(comparison.dtype), torch.finfo(comparison.dtype)
    errors = [Point(d.order, d.error, _PASS[d.key.phase], f"{where(d)}: {number(d.error)}") for d in ops]
    ranges = [Point(d.order, d.largest, _PASS[d.key.phase], f"{where(d)}: {number(d.largest)}") for d in ops]
    limits = {f"{name}: largest": info.max, f"{name}: smallest normal": info.smallest_normal}
    order = "order of computation"
    return [
        Chart(
            "Relative error by depth",
            order,
            "relative error",
            errors,
            {"tolerance of the result": tolerances(comparison.dtype)[1]},
        ),
        Chart(
            "Largest magnitude in float32 against the range of the format", order, "magnitude", ranges, limits
        ),
    ]


def number(value: float | None) -> str:
    """Format a number for the report; ``-`` for None."""
    return "-" if value is None else written(value, "number")


def error_of_loss(comparison: Comparison) -> str:
    """Return the relative error of the loss; ``-`` without a loss or if the reference is not finite."""
    wanted = comparison.reference_loss
    return number(None if wanted is None or not math.isfinite(wanted) else comparison.loss_error)


def error_of_gradients(comparison: Comparison) -> str:
    """Return the largest relative error of a parameter's gradient; ``-`` without one."""
    return number(comparison.gradient_error if comparison.at(PARAMETER) else None)


def where(difference: Difference) -> str:
    """Describe the location of a value: ``matmul in blocks.2.attn``."""
    key = difference.key
    part = "" if key.phase == FORWARD else ", backward"
    return f"{_called(key)} in {key.place}{part}"


def _called(key: Key) -> str:
    return short(key.name) + (f" (result {key.result + 1})" if key.result else "")


def _facts(comparison: Comparison) -> dict[str, str]:
    cause = "none: the result is within the tolerance"
    if leads := comparison.leads():
        cause = f"{_with_line(leads[0])}, adds {number(leads[0].added)}"
    elif comparison.result_error > tolerances(comparison.dtype)[1]:
        cause = "none: no op adds more than the tolerance to the error of the result"
    elif not comparison.reference_is_finite:
        cause = "none: the reference is not finite itself"
    loss = f"{number(comparison.loss)}, reference {number(comparison.reference_loss)}"
    error = error_of_loss(comparison)
    facts = {
        "loss": f"{loss}: {'no relative error' if error == '-' else f'relative error {error}'}",
        "gradients": f"largest relative error of a parameter's {error_of_gradients(comparison)}",
        "first inf or NaN": _first_not_finite(comparison),
        "cause": cause,
        "worst underflow": _worst_underflow(comparison),
        "loss scale": "that of fn" if comparison.scales_itself else number(comparison.scale),
        "values compared": as_count(len(comparison.differences)),
    }
    if not comparison.ran_backward:
        facts["gradients"] = "no backward pass"
        if comparison.loss is None:
            facts["loss"] = "fn returned none: each op counts as a result"
        return facts
    if comparison.loss is None:
        del facts["loss"]
    if not comparison.at(PARAMETER):
        facts["gradients"] = "fn left none of a parameter"
    return facts


def _first_not_finite(comparison: Comparison) -> str:
    first = comparison.first_not_finite
    if first is None:
        return "none"
    known = comparison.loss is not None or bool(comparison.at(PARAMETER))
    harmless = known and math.isfinite(comparison.loss_error) and math.isfinite(comparison.gradient_error)
    return _with_line(first) + (", which does not reach the result" if harmless else "")


def _with_line(difference: Difference) -> str:
    return where(difference) + (f" ({difference.line})" if difference.line else "")


def _worst_underflow(comparison: Comparison) -> str:
    worst = max(comparison.at(OP), key=lambda d: d.underflow, default=None)
    if worst is None or not worst.underflow:
        return "none"
    return f"{where(worst)}, {as_share(worst.underflow)} of the values"


def _notes(comparison: Comparison) -> list[str]:
    notes = reference_notes(comparison)
    if comparison.unmatched:
        notes.append(_UNMATCHED.format(values=counted(comparison.unmatched, "value occurs", "values occur")))
    if comparison.narrow_references:
        notes.append(_NARROW.format(values=counted(comparison.narrow_references, "value is", "values are")))
    if any(d.noise and d.error > 0.5 for d in comparison.differences):
        notes.append(_CANCELS)
    if any(d.random and d.error > 0.5 for d in comparison.differences):
        notes.append(_RANDOM)
    crowded = [name for name, fit in comparison.parameters.items() if fit.saturated > _MANY * fit.elements]
    if crowded:
        notes.append(_CROWDED.format(names=", ".join(crowded)))
    return notes


def reference_notes(comparison: Comparison) -> list[str]:
    """Return the note that the reference run is not finite itself, if so."""
    if comparison.reference_is_finite:
        return []
    first = comparison._reference_fault
    return [
        _NOT_FINITE.format(
            dtype=dtype_name(comparison.reference_dtype),
            first="" if first is None else f", first in {_with_line(first)}",
        )
    ]


_NOT_FINITE = (
    "The loss or a gradient of the {dtype} run has inf or NaN itself{first}: mixed precision is not the "
    "cause, and no rule or loss scale helps. Errors are those of the values that are finite there."
)
_MANY = 0.1
_CROWDED = (
    "More than a tenth of the values of these parameters saturate if a format is given to all ops and not "
    "to matrix products alone: {names}. This biases gradients until training diverges (arXiv 2506.20752). "
    "Leave them out, or round the scale up (e8m0_up)."
)
_UNMATCHED = "{values} in only one run, because an op uses different kernels there, and cannot be compared."
_NARROW = (
    "In the reference run, {values} still in low precision: the step casts them itself, enters a region with "
    "its own policy, or runs under an mp_policy of FSDP2."
)
_CANCELS = (
    "Where larger numbers cancel, only float32 rounding noise is left, as in the gradient of a bias before a "
    "normalization. A large relative error means nothing there and is not counted as added."
)
_RANDOM = (
    "Random ops (dropout) drew different numbers in the two dtypes, so values that depend on them differ. "
    "Compare with model.eval(), or with dropout set to 0."
)


def _figures(d: Difference) -> tuple[Value, ...]:
    added = d.added if d.key.level == OP or d.key.phase == FORWARD else None  # gradients come from outside
    return d.error, added, dtype_name(d.dtype), d.overflow, d.underflow, d.largest, d.order


def _ops(differences: Sequence[Difference]) -> Table:
    rows = [
        (str(d.key.place), _PASS[d.key.phase], _called(d.key), d.key.call + 1, *_figures(d), d.line)
        for d in differences
    ]
    about = (
        "Ordered by the relative error that the op adds to that of its inputs; infinite if it turns finite "
        "numbers into inf or NaN. Underflow: values that are 0 because they are too small for the dtype. "
        "Sort by order to follow the computation."
    )
    spec = columns(f"module, of, op, call, {_FIGURES}, line=source line")
    return Table("ops", "Ops", spec, rows, about)


def _modules(differences: Sequence[Difference]) -> Table:
    rows = [(str(d.key.place), _PASS[d.key.phase], d.key.call + 1, *_figures(d)) for d in differences]
    about = "The results of modules and their gradients."
    return Table("modules", "Modules", columns(f"module, of, call, {_FIGURES}"), rows, about)


def _parameters(differences: Sequence[Difference]) -> Table:
    rows = [(d.key.name, d.error, *_figures(d)[2:]) for d in sorted(differences, key=lambda d: -d.error)]
    spec = columns("parameter, " + _FIGURES.replace(" added=added here,", ""))
    about = "As the optimizer would receive them."
    return Table("parameters", "Gradients of parameters", spec, rows, about)
