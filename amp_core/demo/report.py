"""Output of the demo: a progress bar, a table and a picture."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from amp_core.demo.train import History
from amp_core.scaling.plot import draw_scale, new_figure, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73")


@contextmanager
def progress_bars(console: Console, names: Sequence[str], steps: int) -> Iterator[Callable[[History], None]]:
    """Show a bar per run with loss, scale and skipped steps; yields a callback for the end of each step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    text = TextColumn("loss {task.fields[loss]}  scale {task.fields[scale]}  skipped {task.fields[skipped]}")
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(12),
        MofNCompleteColumn(),
        text,
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        tasks = {name: bar.add_task(name, total=steps, loss="-", scale="-", skipped=0) for name in names}

        def advance(history: History) -> None:
            loss, scale = f"{history.losses[-1]:.4f}", _scale(history)
            task = tasks[history.name]
            bar.update(task, advance=1, loss=loss, scale=scale, skipped=len(history.skipped))

        yield advance


def _scale(run: History) -> str:
    return f"{run.scales[-1]:,.0f}" if run.mixed else "none"


def comparison(runs: list[History]) -> Table:
    """Return a table with the runs side by side."""
    from rich.table import Table

    table = Table(title="Handwritten digits", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    for label, show in _ROWS:
        table.add_row(label, *(show(run) for run in runs))
    return table


_ROWS: list[tuple[str, Callable[[History], str]]] = [
    ("test accuracy", lambda run: f"{run.accuracy:.2%}"),
    ("time per step (median)", lambda run: f"{run.step_seconds * 1e3:.2f} ms"),
    ("peak tensor memory of a step", lambda run: f"{run.peak_bytes / 2**20:.2f} MiB"),
    ("casts per step", lambda run: str(run.casts)),
    ("skipped steps", lambda run: f"{len(run.skipped)} of {len(run.losses)}"),
    ("final scale", _scale),
]


def verdict(full: History, mixed: History, advised: History) -> str:
    """Summarize the table in words."""
    points = abs(mixed.accuracy - full.accuracy) * 100
    ratio, advised_ratio = (run.step_seconds / full.step_seconds for run in (mixed, advised))
    text = (
        f"The accuracies of the first two differ by {points:.2f} points; a step in mixed precision took "
        f"{ratio:.2f} of float32's time."
    )
    if ratio > 1:
        text += " This device gains nothing from it for layers of this size; larger layers may gain."
    text += ' amp_core.advise(step, goal="speed") timed each op in both precisions'
    if not advised.mixed:
        return text + " and advises float32: the runs differ by chance."
    return text + f"; with its policy a step took {advised_ratio:.2f}."


def save_picture(runs: list[History], path: Path, title: str) -> None:
    """Draw the loss and scale curves into `path`; its suffix selects the format."""
    figure = new_figure(8, 6)
    losses, scales = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    _draw_losses(losses, runs)
    draw_scale(scales, dict(enumerate(runs[1].scales)), runs[1].skipped)
    figure.savefig(path)


def _draw_losses(axes: Axes, runs: list[History]) -> None:
    for run, colour in zip(runs, _COLOURS, strict=False):
        axes.plot(run.losses, color=colour, alpha=0.25, linewidth=0.8)
        label = f"{run.name}: {run.accuracy:.1%} of the test images right"
        axes.plot(_smooth(run.losses), color=colour, label=label, linewidth=1.6)
    axes.set_yscale("log")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)
    plain(axes)


def _smooth(values: list[float]) -> list[float]:
    """Average exponentially, so that the trend shows through the noise of single batches."""
    return [*itertools.accumulate(values, lambda mean, value: 0.9 * mean + 0.1 * value)]
