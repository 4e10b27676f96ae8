"""The tables of what formats did to operands, and would do to parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping

from amp_core.debugging.comparison import Comparison
from amp_core.debugging.fits import Fit
from amp_core.debugging.quantized_counts import QuantizedCount, QuantizedKey
from amp_core.debugging.tables import Table, Value, as_share, columns


def quantized_table(
    quantized: Mapping[QuantizedKey, QuantizedCount], fits: Mapping[QuantizedKey, Fit] | None = None
) -> Table:
    """Return the table of what recipes did to operands, and of how well these fit, if that was measured."""
    rows: list[tuple[Value, ...]] = [
        (
            str(key.place),
            key.phase,
            key.role,
            key.format,
            key.rule,
            count.calls,
            count.elements,
            *_shares(count),
            count.inf,
            count.nan,
            *(_figures(fits[key]) if fits else ()),
        )
        for key, count in quantized.items()
    ]
    spec = "module, pass, role, format, rule, calls, elements, saturated, flushed=flushed to 0, inf, nan"
    about = (
        "Operands of matrix products that a recipe quantised. Saturated elements were reduced to the largest "
        "value of the format; flushed ones became 0."
    )
    if fits:
        spec, about = f"{spec}, {_FIGURES}", f"{about} {_ABOUT_FIGURES}"
    return Table("quantized", "Quantised operands", columns(spec), rows, about)


_FIGURES = "error, largest=largest of max, smallest=least of min"
_ABOUT_FIGURES = (
    "Error: what rounding changed, relative to the tensor. The largest and the least magnitude other than 0 "
    "are in units of the scale, over the largest and the smallest value of the format."
)


def format_tables(comparison: Comparison) -> list[Table]:
    """Return the tables of what a comparison found about a format."""
    return [quantized_table(comparison.quantized, comparison.fits), _parameters_table(comparison.parameters)]


def _parameters_table(parameters: Mapping[str, Fit]) -> Table:
    """Return the table of parameters that are in no product with a recipe."""
    worst_first = sorted(parameters.items(), key=lambda item: -item[1].error)
    rows = [(name, fit.elements, *_shares(fit), *_figures(fit)) for name, fit in worst_first]
    spec = columns(f"parameter, elements, saturated, flushed=flushed to 0, {_FIGURES}")
    about = "What the format of weights would do to parameters that are in no product with a recipe."
    return Table("in_format", "Other parameters in the format", spec, rows, about)


def _shares(count: QuantizedCount | Fit) -> tuple[str, ...]:
    numbers = (count.saturated, count.flushed)
    return tuple(as_share(n / count.elements) if count.elements else "" for n in numbers)


def _figures(fit: Fit) -> tuple[float | None, ...]:
    return fit.error, fit.largest, fit.smallest if fit.smallest < math.inf else None
