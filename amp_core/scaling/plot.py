"""Pictures of the scale. Needs matplotlib, which is no dependency of training."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from amp_core.common.extras import needing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito


def new_figure(width: float, height: float) -> Figure:
    """Make a figure that can be saved with no display and no global state of matplotlib's.

    Raises:
        ImportError: matplotlib is not installed; says how to get it.
    """
    with needing("matplotlib", "amp-core[demo]"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_scale(
    axes: Axes,
    scales: Mapping[int, float],
    skipped: Collection[int],
    key: str | None = None,
    colour: str = _COLOURS[0],
) -> None:
    """Draw the scale of each step (by its number) on a logarithmic axis, and mark the `skipped` ones."""
    whose = "" if key is None else f" {key}"
    axes.step(list(scales), list(scales.values()), where="post", color=colour, label=f"loss scale{whose}")
    if skipped:
        heights = [scales[step] for step in skipped]
        label = f"skipped steps{whose}: {len(skipped)}"
        axes.scatter(list(skipped), heights, color="black", marker="x", zorder=3, label=label)
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale")
    axes.set_xlabel("step")
    axes.legend(frameon=False, loc="best")
    plain(axes)


def plain(axes: Axes) -> None:
    """Take away what carries no information."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.margins(x=0.01)


def save_scales(
    scales: Mapping[str | None, Mapping[int, float]],
    skipped: Mapping[str | None, Collection[int]],
    path: str | Path,
) -> None:
    """Draw the scale of each key into the file `path`, whose suffix gives the format."""
    figure = new_figure(8, 3)
    axes = figure.subplots()
    for number, (key, curve) in enumerate(scales.items()):
        draw_scale(axes, curve, skipped[key], key, _COLOURS[number % len(_COLOURS)])
    figure.savefig(path)
