"""The ratios as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.ab import Ratio


def save_ratios(results: Mapping[str, Sequence[Ratio]], path: Path) -> None:
    """Draw one bar a figure; those that end left of 1 are faster than torch, or move fewer bytes."""
    from matplotlib.figure import Figure

    rows = [(group, found) for group, some in results.items() for found in some]
    figure = Figure(figsize=(9, 1.2 + 0.28 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    colours = ["tab:blue" if found.ratio <= 1.0 else "tab:orange" for _, found in rows]
    bars = axes.barh(places, [found.ratio for _, found in rows], color=colours)
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.set_yticks(places, [f"{group}: {found.name}" for group, found in rows], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlim(0.0, 1.15 * max(1.0, *(found.ratio for _, found in rows)))
    axes.set_xlabel("amp-core / torch, less is better")
    figure.savefig(path, dpi=90)
