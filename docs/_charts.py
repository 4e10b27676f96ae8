"""Draw the charts of the pages from the files in benchmarks/results.

An MkDocs hook: ``<!-- chart: NAME -->`` in a page becomes what the function NAME below returns.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_MARK = re.compile(r"^<!-- chart: (\w+) -->$", re.MULTILINE)
_RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
_GREY = "#808080"  # legible on the light and the dark page


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks; an unknown name is a KeyError, which fails the build."""
    return _MARK.sub(lambda mark: _DRAW[mark[1]](), markdown)


def agreement() -> str:
    """Show how far sampler and trainer are apart in each dtype, while the model trains."""
    runs = json.loads((_RESULTS / "agreement" / "gpt.json").read_text())["runs"]
    figure, (byte, largest) = _figure(2)
    for dtype, colour in (("bfloat16", "#D55E00"), ("float16", "#0072B2")):
        rows = runs[dtype]["rows"]
        steps = [row["step"] for row in rows]
        for axes, key in ((byte, "byte"), (largest, "largest")):
            axes.plot(steps, [row[key] for row in rows], marker="o", color=colour, label=dtype)
    byte.set_title("mean over the bytes")
    largest.set_title("largest")
    byte.set_ylabel("gap of the log-probability")
    for axes in (byte, largest):
        axes.set_yscale("log")
        axes.set_xlabel("training step")
    byte.legend(frameon=False, labelcolor=_GREY)
    return _svg(figure, "The gap between sampler and trainer in bfloat16 and float16")


def curves() -> str:
    """Draw the loss of a small GPT in each format, and above float32's; say where each ends."""
    measured = json.loads((_RESULTS / "curves" / "gpt.json").read_text())
    losses, every = measured["loss"], measured["mean_of"]
    figure, (loss, above) = _figure(2)
    for colour, (name, values) in zip(_COLOURS, losses.items(), strict=True):
        steps = [every * (i + 0.5) for i in range(len(values))]
        loss.plot(steps, values, color=colour, label=name, linewidth=1.2)
        beyond = [value - exact for value, exact in zip(values, losses["float32"], strict=True)]
        above.plot(steps, beyond, color=colour, linewidth=1.2)
    loss.set_title("loss")
    above.set_title("loss above float32's")
    above.set_ylim(-0.04, 0.04)
    for axes in (loss, above):
        axes.set_xlabel("training step")
    loss.legend(frameon=False, labelcolor=_GREY)
    last = 50 // every
    rows = [f"| {name} | {sum(values[-last:]) / last:.3f} |" for name, values in losses.items()]
    table = ["| format | mean loss of the last 50 steps |", "|---|--:|", *rows]
    return _svg(figure, "Loss of a small GPT in seven formats") + "\n\n" + "\n".join(table)


_DRAW: dict[str, Callable[[], str]] = {f.__name__: f for f in (agreement, curves)}
_COLOURS = (_GREY, "#8A7FE8", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7")


def _figure(columns: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(4.2 * columns, 3.2), layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False)[0]
    for axes in panels:
        axes.tick_params(colors=_GREY, which="both")
        axes.grid(alpha=0.2)
        for part in (axes.title, axes.xaxis.label, axes.yaxis.label):
            part.set_color(_GREY)
        for spine in axes.spines.values():
            spine.set_visible(False)
    return figure, panels


def _svg(figure: Figure, title: str) -> str:
    page = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(page, format="svg", transparent=True, metadata={"Date": None})
    picture = page.getvalue()
    picture = re.sub(r"\s*\n\s*", " ", picture[picture.index("<svg") :])  # an empty line would end the HTML
    return picture.replace(
        "<svg ", f'<svg role="img" aria-label="{title}" style="max-width:100%;height:auto" ', 1
    )
