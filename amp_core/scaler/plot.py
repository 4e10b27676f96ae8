"""Pictures of the scale. Needs matplotlib, which is no dependency of training."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOUR = "#D55E00"


def new_figure(width: float, height: float) -> Figure:
    """Make a figure that can be saved with no display and no global state of matplotlib's.

    Raises:
        ImportError: matplotlib is not installed; says how to get it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "a picture needs matplotlib; install it with: pip install 'amp-core[demo]'"
        ) from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_scale(axes: Axes, scales: Mapping[int, float], skipped: Collection[int]) -> None:
    """Draw the scale of each step (by its number) on a logarithmic axis, and mark the `skipped` ones."""
    axes.step(list(scales), list(scales.values()), where="post", color=_COLOUR, label="loss scale")
    if skipped:
        heights = [scales[step] for step in skipped]
        label = f"skipped steps: {len(skipped)}"
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


def save_scale(scales: Mapping[int, float], skipped: Collection[int], path: str | Path) -> None:
    """Draw the scale into the file `path`, whose suffix gives the format."""
    figure = new_figure(8, 3)
    draw_scale(figure.subplots(), scales, skipped)
    figure.savefig(path)
