"""The reports for `Advice`, `SpeedAdvice` and `FormatAdvice`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from amp_core.common.text import counted
from amp_core.debugging.advice import Advice, FormatAdvice, LayerInFormat, SpeedAdvice
from amp_core.debugging.capture import OP
from amp_core.debugging.comparison import Comparison
from amp_core.debugging.comparison_report import error_of_gradients, error_of_loss, number, reference_notes
from amp_core.debugging.format_tables import format_tables
from amp_core.debugging.report import content_of
from amp_core.debugging.tables import Content, Table, as_seconds, as_share, columns
from amp_core.errors import PolicyError
from amp_core.policy.names import short

_FILE = "The proposal: autocast(policy=advice.policy), advice.apply(model), GradScaler(init_scale=...)"
_TESTED = "The proposal was tested on this one step. Nothing has been changed."
_READ = "Read from a file, which has the proposal alone. Nothing has been changed."


@content_of.register
def _(advice: Advice) -> Content:
    return Content(
        "Advice for mixed precision",
        _facts(advice),
        _notes(advice),
        [] if advice.after is None else [_findings(advice), _gain(advice)],
        {_FILE: _file(advice)},
    )


def _file(advice: Advice) -> str:
    try:
        return advice.to_toml()
    except PolicyError as error:  # it has an element format of one's own
        return f"There is no file of it. {error}"


def _facts(advice: Advice) -> dict[str, str]:
    if advice.before is None:
        return {}
    fixed = sum(bool(f.fix) for f in advice.findings)
    return {
        "faults found": f"{len(advice.findings)}, {fixed} fixed",
        "init_scale": _scale(advice.before) if advice.init_scale is None else f"{advice.init_scale:g}",
    }


def _scale(comparison: Comparison) -> str:
    """Return why there is no loss scale."""
    if comparison.dtype is not torch.float16:
        return "not needed"
    if not comparison.reference_is_finite:
        return "not sought, as float32 has inf or NaN itself"
    if comparison.ran_backward:
        return "not sought, as fn runs the backward pass itself"
    return "not sought, as there is no backward pass: fn returned no loss that requires a gradient"


def _notes(advice: Advice) -> list[str]:
    if advice.after is None:
        return [_READ]
    unfixed = [f.fault for f in advice.findings if not f.fix]
    notes = ["No attempt fixed these: " + "; ".join(unfixed) + "."] if unfixed else []
    return [*reference_notes(advice.after), *notes, _TESTED]


def _findings(advice: Advice) -> Table:
    rows = [
        (f.module, f.op, f.fault, f.fix or "no attempt helped", f.before, f.after, f.line)
        for f in advice.findings
    ]
    spec = columns("module, op, fault, fix=fixed by, before, after, line=source line")
    about = (
        "Before and after: the relative error that the op adds (inf if it produces inf or NaN), or the share "
        "of a gradient's values that underflow."
    )
    return Table("findings", "Faults", spec, rows, about)


def _gain(advice: Advice, more: Mapping[str, Callable[[Comparison], str]] = MappingProxyType({})) -> Table:
    both = [c for c in (advice.before, advice.after) if c is not None]
    measures = {
        "relative error of the loss": [*map(error_of_loss, both)],
        "largest relative error of a parameter's gradient": [*map(error_of_gradients, both)],
        "ops whose result has inf or NaN": [_not_finite(c) for c in both],
        "ops in low precision": [_low_share(c) for c in both],
    }
    measures |= {label: [measure(c) for c in both] for label, measure in more.items()}
    rows = [(label, *values) for label, values in measures.items()] if len(both) == 2 else []
    about = "The step against float32, without and with the proposal."
    return Table("gain", "Gain", columns("measure, before, after"), rows, about)


def _not_finite(comparison: Comparison) -> str:
    return str(len({d.key._replace(result=0) for d in comparison.at(OP) if d.overflow}))


def _low_share(comparison: Comparison) -> str:
    ops = [d for d in comparison.at(OP) if not d.key.result]  # of an op with several, the first result
    low = comparison.dtype if comparison.dtype.itemsize < comparison.reference_dtype.itemsize else None
    return as_share(sum(d.dtype == low for d in ops) / len(ops)) if ops else "none"


_SPEED_FILE = "The proposal: autocast(enabled=advice.enabled, policy=advice.policy), advice.apply(model)"


@content_of.register
def _(advice: SpeedAdvice) -> Content:
    rows = [(short(e.op), e.shapes, e.work, e.calls, e.float32, e.low, e.chained, e.rule) for e in advice.ops]
    about = (
        "Forward and backward of one call on its own. Low precision: with casts of all arguments; chained: "
        "with casts of parameters only, as when the op before ran in low precision too."
    )
    spec = columns("op, shapes, work, calls, float32, low=low precision, chained, rule")
    measured = "Measured on this machine, with this batch. Nothing has been changed."
    return Content(
        "Advice for speed",
        _speed_facts(advice),
        [measured if advice.seconds else _READ],
        [Table("ops", "Ops that may run in low precision", spec, rows, about)] if advice.seconds else [],
        {_SPEED_FILE: _file(advice)} if advice.enabled else {},
    )


def _speed_facts(advice: SpeedAdvice) -> dict[str, str]:
    seconds = advice.seconds
    if not seconds:
        return {}
    facts = {name: f"{as_seconds(seconds[name])} per step" for name in ("float32", "autocast", "advice")}
    faster = min(seconds["float32"], seconds["autocast"])
    facts["gain"] = f"{1 - seconds['advice'] / faster:.1%} over the faster of float32 and autocast"
    if not advice.enabled:
        facts["gain"] = "none: float32 is the fastest; use autocast(enabled=advice.enabled), which is False"
    elif seconds["advice"] == seconds["autocast"]:
        facts["gain"] = "none: plain autocast is the fastest"
    return facts


@content_of.register
def _(advice: FormatAdvice) -> Content:
    notes = [_READ] if advice.after is None else [*reference_notes(advice.after), _TESTED]
    if advice.after is not None and not advice.is_tolerable:
        notes.insert(0, f"Without the format, the error is {number(advice.after.result_error)} already.")
    tables = [] if advice.after is None else [_layers(advice), _gain(advice, _BESIDE)]
    tables += [] if advice.before is None else format_tables(advice.before)
    return Content("Advice for a format", _format_facts(advice), notes, tables, {_FILE: _file(advice)})


def _format_facts(advice: FormatAdvice) -> dict[str, str]:
    if advice.after is None:
        return {}
    kept, layers = sum(layer.kept for layer in advice.layers), counted(len(advice.layers), "layer")
    return {
        "in the format": f"{as_share(advice.share)} of the work, {kept} of {layers}",
        "left out": ", ".join(_name(layer) for layer in advice.layers if not layer.kept) or "none",
        "tolerance": f"{number(advice.tolerance)} in loss and gradients",
    }


_BESIDE = {"the larger of both, over the largest gradient's norm": lambda c: number(c.result_error)}


def _name(layer: LayerInFormat) -> str:
    return short(layer.op) if layer.module is None else f"{short(layer.op)} in {layer.module or 'the model'}"


def _layers(advice: FormatAdvice) -> Table:
    total = max(sum(layer.work for layer in advice.layers), 1)
    rows = [
        (
            "(everywhere)" if layer.module is None else layer.module,
            short(layer.op),
            layer.work,
            as_share(layer.work / total),
            layer.alone,
            "yes" if layer.kept else "no",
        )
        for layer in advice.layers
    ]
    spec = columns("module, op, work, share, error=error alone, kept=in the format")
    about = (
        "Work is that of the forward pass. Error alone: of the loss or a gradient, over the largest one's "
        "norm, with this layer alone in the format."
    )
    return Table("layers", "Layers", spec, rows, about)
