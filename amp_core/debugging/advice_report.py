"""The report for `Advice`."""

from __future__ import annotations

from amp_core.debugging.advice import Advice
from amp_core.debugging.capture import OP
from amp_core.debugging.comparison import Comparison
from amp_core.debugging.comparison_report import number
from amp_core.debugging.report import content_of
from amp_core.debugging.tables import Column, Content, Table, as_share

_FILE = "The proposal: autocast(policy=advice.policy), advice.apply(model), GradScaler(init_scale=...)"


@content_of.register
def _(advice: Advice) -> Content:
    return Content(
        "Advice for mixed precision",
        _facts(advice),
        _notes(advice),
        [_findings(advice), _gain(advice)],
        {_FILE: advice.to_toml()},
    )


def _facts(advice: Advice) -> dict[str, str]:
    fixed = sum(bool(f.mend) for f in advice.findings)
    return {
        "faults found": f"{len(advice.findings)}, {fixed} fixed",
        "init_scale": "not needed" if advice.init_scale is None else f"{advice.init_scale:g}",
    }


def _notes(advice: Advice) -> list[str]:
    unfixed = [f.what for f in advice.findings if not f.mend]
    notes = ["No attempt fixed these: " + "; ".join(unfixed) + "."] if unfixed else []
    return [*notes, "The proposal was tested on this one step. Nothing has been changed."]


def _findings(advice: Advice) -> Table:
    rows = [
        (f.module, f.op, f.what, f.mend or "no attempt helped", f.before, f.after, f.line)
        for f in advice.findings
    ]
    columns = (
        Column("module", "module"),
        Column("op", "op"),
        Column("what", "fault"),
        Column("mend", "fixed by"),
        Column("before", "before", "number"),
        Column("after", "after", "number"),
        Column("line", "source line"),
    )
    about = (
        "Before and after: the relative error that the op adds (inf if it produces inf or NaN), or the share "
        "of a gradient's values that underflow."
    )
    return Table("findings", "Faults", columns, rows, about)


def _gain(advice: Advice) -> Table:
    both = [c for c in (advice.before, advice.after) if c is not None]
    measures = {
        "relative error of the loss": [number(c.loss_error) for c in both],
        "largest relative error of a parameter's gradient": [number(c.gradient_error) for c in both],
        "ops whose result has inf or NaN": [str(sum(d.overflow > 0 for d in c.at(OP))) for c in both],
        "ops in low precision": [_low_share(c) for c in both],
    }
    rows = [(label, *values) for label, values in measures.items()] if len(both) == 2 else []
    columns = (Column("measure", "measure"), Column("before", "before"), Column("after", "after"))
    return Table("gain", "Gain", columns, rows, "The step against float32, without and with the proposal.")


def _low_share(comparison: Comparison) -> str:
    ops = comparison.at(OP)
    return as_share(sum(d.dtype == comparison.dtype for d in ops) / len(ops)) if ops else "none"
