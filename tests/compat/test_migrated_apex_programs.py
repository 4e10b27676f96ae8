"""Random programs that use apex.amp train as before once they are rewritten to torch.amp."""

from __future__ import annotations

import contextlib
import random
import re
import sys
import types
from collections.abc import Iterator
from textwrap import indent
from typing import Any

import pytest
import torch
from torch import nn

from amp_compat.migrate.names import TARGETS
from amp_compat.migrate.source import migrate_source

from ..drawn import programs

NORM = "def norm(net):\n    return sum(float(p.grad.norm()) for p in net.parameters())\n"
CLIP = "def clip(ps):\n    clip_grad_norm_(ps, 0.1)\n"
PARTIAL = "from functools import partial\nlimit = partial(torch.nn.utils.clip_grad_norm_, max_norm=0.1)\n"
LEAVE = "optimizer.zero_grad()\n    continue"
READS = (  # definitions, and what reads gradients between the backward pass and the step
    ("", ""),
    ("", "clip_grad_norm_(amp.master_params(optimizer), 0.1)"),
    ("", "torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)"),
    (CLIP, "clip(model.parameters())"),
    (CLIP + "def limit(net):\n    clip(net.parameters())\n", "limit(model)"),
    ("from torch.nn.utils import clip_grad_norm_ as limit\n", "limit(model.parameters(), 0.1)"),
    (PARTIAL, "limit(model.parameters())"),
    ("limit = lambda net: clip_grad_norm_(net.parameters(), 0.1)\n", "limit(model)"),
    ("limit = torch.nn.utils.clip_grad_norm_\n", "limit(amp.master_params(optimizer), 0.1)"),
    ("", "plot_grad_flow(model)\nclip_grad_norm_(model.parameters(), 0.1)"),
    (f"class U:\n    @staticmethod\n{indent(CLIP, '    ')}", "U.clip(model.parameters())"),
    (NORM, "seen.append(norm(model))"),
    (NORM, f"if norm(model) > 0.7:\n    {LEAVE}"),
    ("", f"if clip_grad_norm_(model.parameters(), 0.1) > 0.7:\n    {LEAVE}"),
    ("", f"n = clip_grad_norm_(amp.master_params(optimizer), 0.1)\nif n > 0.7:\n    {LEAVE}"),
    ("", "for p in model.parameters():\n    if p.grad.norm() > 0.7: break\n    p.grad.mul_(0.5)"),
)
FORWARD = (
    "loss = mse(model(x), y)",
    "out = model(x)\nloss = mse(out, y)\nif len(x) > 2:\n    loss = loss + 0.1 * out.pow(2).mean()",
)
AFTER = ("", "seen.append(float({name}.detach()))", "seen.append(float(loss.detach()))")


def program(pick: random.Random, definitions: str, read: str) -> str:
    styles = ["function", "class", "switch"]
    if "grad" not in definitions:  # else they are in the scope that reads gradients
        styles.append("module")
    window, style = pick.choice((1, 2)), pick.choice(styles)
    name = pick.choice(("scaled", "loss_"))
    after = "" if style == "switch" else pick.choice(AFTER).format(name=name)
    backward = f"with amp.scale_loss(loss, optimizer) as {name}:\n    {name}.backward()"
    if pick.random() < 0.2:
        backward += "\n    seen.append(1)"
    if style == "switch":
        backward = f"if fp16:\n{indent(backward, '    ')}\nelse:\n    loss.backward()"
    step = f"{read}\noptimizer.step()\noptimizer.zero_grad()"
    if window > 1:
        step = f"if (i + 1) % {window} == 0:\n{indent(step, '    ')}"
    forward = f"{pick.choice(FORWARD)}\nloss = loss / {window}"
    body = indent("\n".join((forward, backward, step, after)), "    ")
    loop = f"for i, (x, y) in enumerate(data):\n{body}\n"
    head = f"import torch\nfrom torch.nn.utils import clip_grad_norm_\nfrom apex import amp\n{definitions}"
    return head + around(style, loop)


CLASS = """class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.model, self.optimizer = amp.initialize(self.model, self.optimizer)
    def fit(self, data):
{loop}
Trainer(model, optimizer).fit(data)
"""


def around(style: str, loop: str) -> str:
    start = "model, optimizer = amp.initialize(model, optimizer)\n"
    if style == "module":
        return start + loop
    if style == "class":
        own = re.sub(r"\b(model|optimizer)\b", r"self.\1", loop)
        return CLASS.format(loop=indent(own, " " * 8))
    guarded = f"if fp16:\n    {start}" if style == "switch" else start
    body = indent(guarded + loop, "    ")
    return f"def train(model, optimizer, data, fp16=True):\n{body}train(model, optimizer, data)\n"


class Apex:
    """Scales by a fixed number, and unscales after each backward pass, as apex does."""

    def initialize(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        return model, optimizer

    def master_params(self, optimizer: Any) -> Iterator[torch.Tensor]:
        return (p for group in optimizer.param_groups for p in group["params"])

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> Iterator[torch.Tensor]:
        params = list(self.master_params(optimizer))
        before = [p.grad for p in params]
        for p in params:
            p.grad = None
        yield loss * 65536.0
        for p, grad in zip(params, before, strict=True):
            assert p.grad is not None
            p.grad = p.grad / 65536.0 + (0 if grad is None else grad)


def run(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights that the program leaves, and what it has seen."""
    torch.manual_seed(0)
    model, seen = nn.Linear(4, 2), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = [(torch.randn(size, 4), torch.randn(size, 2)) for size in (3, 2, 3, 2, 3, 2)]

    def plot_grad_flow(net: nn.Module) -> None:
        seen.extend(float(p.grad.norm()) for p in net.parameters() if p.grad is not None)

    names = {"model": model, "optimizer": optimizer, "data": data, "seen": seen}
    exec(text, {**names, "mse": nn.functional.mse_loss, "plot_grad_flow": plot_grad_flow})
    return nn.utils.parameters_to_vector(model.parameters()).detach(), torch.tensor(seen)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import such an apex, and scale by torch.amp on the CPU, in float32 as apex does here."""
    scaler = torch.amp.GradScaler
    apex = types.ModuleType("apex")
    apex.__dict__["amp"] = Apex()
    monkeypatch.setitem(sys.modules, "apex", apex)
    monkeypatch.setattr(torch.amp, "GradScaler", lambda _, **options: scaler("cpu", **options))
    monkeypatch.setattr(torch.amp, "autocast", lambda *_, **__: contextlib.nullcontext())


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("number", range(len(READS)))
def test_a_program_trains_as_before(number: int) -> None:
    """Functions of the file clip scaled gradients, a step left out is an error, or a name is missing."""
    for pick in programs(most=1, number=number):
        old = program(pick, *READS[number])
        new = migrate_source(old, TARGETS["torch.amp"]).text
        assert "apex" not in new
        for found, expected in zip(run(new), run(old), strict=True):
            assert torch.allclose(found, expected, rtol=1e-4), f"{old}\nbecame\n{new}"
