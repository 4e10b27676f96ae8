"""Draw the pictures and tables of the explanation pages from the code's own state tables.

An MkDocs hook: ``<!-- draw: NAME -->`` in a page becomes what the function NAME below returns.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn

import amp_core
from amp_core import OpPolicy
from amp_core.debugging.page import as_page
from amp_core.debugging.report import Report
from amp_core.kernels import Kernels, ScaledProducts
from amp_core.plugin import Backend
from amp_core.plugin.contract import HOOKS, KERNELS, PROMISES, SCALED_PRODUCTS, Promise
from amp_core.policy.rules import RULES
from amp_core.states.loss_scale import LossScaleSchedule, OptState, ScaleState, next_scale, next_stage
from amp_core.testing.suite import BackendConformance

_MARK = re.compile(r"^<!-- draw: (\w+) -->$", re.MULTILINE)
_DEVICES = ("cpu", "cuda", "xpu", "mps")
_TABLED = (*_DEVICES, "mtia", "maia")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks; an unknown name is a KeyError, which fails the build."""
    return _MARK.sub(lambda mark: _DRAW[mark[1]](), markdown)


def rules() -> str:
    """Say what each rule does and how many ops of each device have it."""
    counts = {d: Counter(OpPolicy.default(d).rules.values()) for d in _DEVICES}
    lines = [f"| Rule | What it does | {' | '.join(_DEVICES)} |", "|---|---|" + "--:|" * len(_DEVICES)]
    for name, text in RULES.items():
        numbers = [counts[d][name] for d in _DEVICES]
        if any(numbers):
            lines.append(f"| `{name}` | {text} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def ops() -> str:
    """List every op that some device has a rule for, with the devices that have it, and the uniform rule."""
    policies = {d: dict(OpPolicy.default(d)) for d in _TABLED}
    uniform = dict(OpPolicy.uniform("cpu"))
    lines = ["| op | rule, by device | `uniform` |", "|---|---|---|"]
    for op in sorted({op for rules in (*policies.values(), uniform) for op in rules}):
        devices = defaultdict(list)
        for device in _TABLED:
            if op in policies[device]:
                devices[policies[device][op]].append(device)
        cell = "<br>".join(f"`{rule}`: {', '.join(found)}" for rule, found in devices.items())
        same = f"`{uniform[op]}`" if op in uniform else ""
        lines.append(f"| `{op.removesuffix('.default')}` | {cell} | {same} |")
    return "\n".join(lines)


def passes() -> str:
    """Show the ratios to torch of steps and of passes over gradients."""
    return _measured("gradients", "bandwidth", "traffic")


def casts() -> str:
    """Show the ratios to torch of `cached_casts` and `master_weights`."""
    return _measured("casts")


def overheads() -> str:
    """Show the ratios to torch of regions."""
    return _measured("regions")


_CAPABILITIES = {"default": "SSE2", "avx2": "AVX2", "avx512": "AVX-512"}
_RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def _measured(*groups: str) -> str:
    """Return the ratio of each row by instruction set: the range over the CPUs that were measured."""
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for file in sorted(_RESULTS.glob("*.json")):
        measured = json.loads(file.read_text())
        for row in [row for group in groups if group in measured for row in measured[group]["rows"]]:
            ratios[row["name"]][file.stem.rpartition("-")[2]].append(row["ratio"])
    lines = [f"| what | {' | '.join(_CAPABILITIES.values())} |", "|---|--:|--:|--:|"]
    for name, by_set in ratios.items():
        lines.append(f"| {name} | {' | '.join(_range(by_set[key]) for key in _CAPABILITIES)} |")
    return "\n".join(lines)


def _range(ratios: list[float]) -> str:
    ends = [f"{end:.2f}" for end in (min(ratios), max(ratios))] if ratios else []
    return " to ".join(dict.fromkeys(ends))


def promises() -> str:
    """Say what every hook and kernel promises."""
    return "\n".join(
        ["| | promise |", "|---|---|", *(f"| {name} | {text} |" for name, text in PROMISES.items())]
    )


def capabilities() -> str:
    """Show what each device in docs/reports can do, and whether its backend passed the kit."""
    reports = [json.loads(path.read_text()) for path in sorted(_REPORTS.glob("*.json"))]
    names = dict.fromkeys(name for report in reports for name in report["capabilities"])
    lines = [
        "| |" + "|".join(report["device_type"] for report in reports) + "|",
        "|---|" + "---|" * len(reports),
    ]
    for name in names:
        lines.append(
            f"| {name} |" + "|".join(report["capabilities"].get(name, "") for report in reports) + "|"
        )
    lines.append("| checks |" + "|".join(_outcomes(report) for report in reports) + "|")
    versions = [f"torch {r['versions']['torch']}, amp-core {r['versions']['amp-core']}" for r in reports]
    return "\n".join([*lines, "| with |" + "|".join(versions) + "|"])


def _outcomes(report: Mapping[str, Any]) -> str:
    counts = Counter(result["outcome"] for result in report["results"])
    asked = {f"test_{result['check']}" for result in report["results"]}
    counts["newer than the report"] = len(
        [name for name in dir(BackendConformance) if name.startswith("test_") and name not in asked]
    )
    return ", ".join(f"{n} {outcome}" for outcome, n in counts.items() if n)


_REPORTS = Path(__file__).with_name("reports")


def hooks() -> str:
    """Say what each hook of a backend promises."""
    return _promises(Backend, HOOKS)


def kernels() -> str:
    """Say what each kernel promises."""
    return _promises(Kernels, KERNELS)


def scaled_products() -> str:
    """Say what products of quantised matrices promise."""
    return _promises(ScaledProducts, SCALED_PRODUCTS)


def _promises(cls: type, promises: Mapping[str, Promise]) -> str:
    lines = ["| method | gives | writes | host waits | errors |", "|---|---|---|---|---|"]
    for name, promise in promises.items():
        names = [p for p in inspect.signature(getattr(cls, name)).parameters if p != "self"]
        lines.append(f"| `{name}({', '.join(names)})` | {' | '.join(promise)} |")
    return "\n".join(lines)


def stages() -> str:
    """Draw the stages of one optimizer, with an arrow for every call that is allowed."""
    x = {stage: 110 + 240 * index for index, stage in enumerate(OptState)}
    parts = [_circle(x[stage], stage.name) for stage in OptState]
    refused = []
    for stage in OptState:
        for call in ("unscale_", "step"):
            try:
                parts.append(_arrow(x[stage], x[next_stage(stage, call)], call))
            except RuntimeError as error:
                refused.append(f"| {stage.name} | `{call}` | {escape(str(error))} |")
        if stage is not OptState.READY:
            parts.append(_arrow(x[stage], x[OptState.READY], "update"))
    table = ["| Stage | Call | RuntimeError |", "|---|---|---|", *refused]
    return _svg(700, 300, parts, "Stages of one optimizer") + "\n\n" + "\n".join(table)


def schedule() -> str:
    """Draw the scale over 40 steps with overflows at some of them, as `next_scale` moves it."""
    rule, overflows = LossScaleSchedule(growth_interval=8), (2, 3, 21)
    state, powers = ScaleState(2.0**16), []
    for step in range(40):
        powers.append(state.scale.hex().partition("p")[2])
        state = next_scale(state, step in overflows, rule)
    heights = [200 - 35 * (int(power) - 13) for power in powers]
    points = " ".join(f"{60 + 15 * (i + d)},{y}" for i, y in enumerate(heights) for d in (0, 1))
    parts = [f'<polyline points="{points}" fill="none" stroke="#D55E00" stroke-width="2.5"/>']
    parts += [_text(60 + 15 * i + 7, heights[i] - 8, "&#x2715;", "middle", "inherit") for i in overflows]
    for power in sorted(set(powers), key=int):
        y = 200 - 35 * (int(power) - 13)
        parts.append(_text(50, y + 5, f"2<tspan dy='-6' font-size='10'>{int(power)}</tspan>", "end"))
        parts.append(f'<line x1="60" x2="660" y1="{y}" y2="{y}" stroke="currentColor" opacity="0.15"/>')
    parts.append(_text(360, 235, "step (&#x2715;: overflow, the step is skipped)", "middle"))
    return _svg(700, 250, parts, "The loss scale over forty steps")


def dispatch() -> str:
    """Draw the way of one op through its dispatch keys."""
    rule = OpPolicy.default("cpu").rule("aten::mm")
    boxes = [
        ("torch.mm(x, w)", "float32"),
        ("Autocast", rule),
        ("Autograd", "records it"),
        ("kernel", "bfloat16"),
    ]
    parts = []
    for i, (name, detail) in enumerate(boxes):
        size = f'x="{8 + 220 * i}" y="10" width="185" height="64" rx="8"'
        parts.append(f'<rect {size} fill="none" stroke="currentColor"/>')
        parts.append(_text(100 + 220 * i, 37, name, "middle", "inherit"))
        parts.append(_text(100 + 220 * i, 60, detail, "middle"))
        if i:
            parts.append(_line(f"M{220 * i - 26},42 L{220 * i + 6},42"))
    return _svg(865, 90, parts, "torch.mm on its way through a region")


def recording() -> str:
    """Show the page that a recording writes."""
    step = _step()
    with amp_core.record() as r:
        with amp_core.autocast("cpu"):
            loss = step()
        loss.backward()
    return _framed(r, "The page that r.to_html() writes")


def comparison() -> str:
    """Show the page that a comparison writes: of a model with an overflow in one of its layers."""
    return _framed(amp_core.compare(_step(), "cpu", dtype=torch.float16), "The page that c.to_html() writes")


def _step() -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32))
    model = nn.Sequential(OrderedDict(body=body, head=nn.Linear(32, 4)))
    model.body[3].weight.data *= 3e5
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    return lambda: nn.functional.mse_loss(torch.softmax(model(x), -1), y)


def _framed(report: Report, title: str) -> str:
    style = "width: 100%; height: 36rem; border: 1px solid #8884; border-radius: 6px"
    page = escape(as_page(report.content())).replace("\n", "&#10;")  # Markdown ends HTML at an empty line
    return f'<iframe title="{title}" style="{style}" srcdoc="{page}"></iframe>'


_DRAW: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        *(capabilities, casts, comparison, dispatch, hooks, kernels, ops, overheads),
        *(passes, promises, recording, rules, scaled_products, schedule, stages),
    )
}


def _svg(width: int, height: int, parts: list[str], title: str) -> str:
    head = '<defs><marker id="tip" orient="auto" markerWidth="9" markerHeight="9" refX="8" refY="4">'
    head += '<path d="M0,0 L8,4 L0,8 z" fill="currentColor"/></marker></defs>'
    style = "max-width:100%;height:auto;font-size:14px"
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{title}" '
        f'style="{style}">{head}{"".join(parts)}</svg>'
    )


def _circle(x: int, name: str) -> str:
    shape = f'<ellipse cx="{x}" cy="150" rx="62" ry="30" fill="none" stroke="currentColor" stroke-width="2"/>'
    return shape + _text(x, 155, name, "middle")


def _arrow(start: int, end: int, call: str) -> str:
    """Bend forward arrows up and arrows back down, further the longer they are."""
    bend = (end - start) // 4
    side = -28 if bend > 0 else 28
    foot, crest = 150 + side, 150 + side - bend
    path = f"M{start},{foot} Q{(start + end) // 2},{crest - bend} {end},{foot}"
    return _line(path) + _text((start + end) // 2, crest + (16 if bend > 0 else -8), call, "middle")


def _line(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="currentColor" marker-end="url(#tip)"/>'


def _text(
    x: float, y: float, text: str, anchor: str, family: str = "var(--md-code-font-family, monospace)"
) -> str:
    place = f'x="{x}" y="{y}" text-anchor="{anchor}"'
    return f'<text {place} fill="currentColor" font-family="{family}">{text}</text>'
