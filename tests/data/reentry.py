"""Run a program, and at each of its lines in amp-core another one; all must end as if they were alone."""

from __future__ import annotations

import faulthandler
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from drawn import TIMES, chance
from torch import Tensor, nn

import amp_core
from amp_core import GradScaler, OpPolicy, Recipe, autocast

SIZE = 300  # so that kernels cast the weights, and memory is kept


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, 8))


def train(
    net: nn.Sequential, rules: dict[str, Any] | None = None, storage: str | None = None
) -> list[Tensor]:
    policy = OpPolicy.default("cpu").override(rules or {})  # not that of a region which is interrupted
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    if storage is not None:
        amp_core.master_weights(net, optimizer, storage)
    scaler, x = GradScaler("cpu", overlap=True), torch.linspace(-1, 1, 4 * SIZE).view(4, SIZE)
    for _ in range(2):
        optimizer.zero_grad()
        with autocast("cpu", policy=policy):
            loss = net(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
    return [p.detach().float() for p in net.parameters()]


def scoped(
    scope: Callable[[nn.Module], AbstractContextManager[Any]], rules: dict[str, Any] | None = None
) -> list[Tensor]:
    net = model()
    with scope(net):
        return train(net, rules)


PROGRAMS: dict[str, Callable[[], list[Tensor]]] = {
    "casts": lambda: scoped(amp_core.cached_casts),
    "masters": lambda: train(model(), storage="fp32"),
    "delayed": lambda: scoped(amp_core.delayed_scales, {"linear": Recipe.fp8_delayed(history=4)}),
    "recorded": lambda: scoped(amp_core.record),
    "policy": lambda: scoped(lambda _: nullcontext(), {"linear": "fp32"}),
}


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, got, expected))


def main(name: str) -> None:
    faulthandler.dump_traceback_later(60 * TIMES, exit=True)
    warnings.simplefilter("ignore", amp_core.EmulationWarning)
    others = [other for other in PROGRAMS if other != "recorded"]
    alone = {other: PROGRAMS[other]() for other in others}
    folder, seen, pick = str(Path(amp_core.__file__).parent), set[tuple[CodeType, int]](), chance()
    end = time.monotonic() + 8.0 * TIMES

    def tracer(frame: FrameType, event: str, _arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(folder):
            return None
        line = frame.f_code, frame.f_lineno
        if event == "line" and line not in seen and (len(seen) <= 100 or time.monotonic() < end):
            seen.add(line)
            other = pick.choice(others)
            # A line runs while the weights of a model are drawn.
            with torch.random.fork_rng([]), torch.enable_grad(), torch.autocast("cpu", enabled=False):
                got = PROGRAMS[other]()
            assert same(got, alone[other]), f"{other} differs at {line}"
        return tracer

    sys.settrace(tracer)
    got = PROGRAMS[name]()
    sys.settrace(None)
    assert len(seen) > 100
    assert same(got, PROGRAMS[name]()), f"{name} differs"


main(sys.argv[1])
