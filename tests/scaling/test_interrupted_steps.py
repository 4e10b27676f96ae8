"""Fused steps that a signal breaks off between two lines."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from amp_core import GradScaler
from amp_core.scaling import fused


def trained(interrupt_at: int | None) -> tuple[torch.Tensor, bool]:
    """Return a weight after a step that is broken off at the start of the given line, and another one."""
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    scaler, met = GradScaler("cpu", init_scale=64.0), False

    def tracer(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal met
        if frame.f_code is not fused.step_on_device.__code__:
            return tracer if frame.f_code is GradScaler._step_fused.__code__ else None
        if event == "line" and frame.f_lineno == interrupt_at:
            met = True
            raise KeyboardInterrupt
        return tracer

    for call in (sys.settrace, lambda _: None) if interrupt_at is not None else (lambda _: None,):
        scaler.scale(weight.square().sum()).backward()
        call(tracer)
        try:
            scaler.step(optimizer)
        except KeyboardInterrupt:
            assert torch.equal(weight, torch.ones(4))
        finally:
            sys.settrace(None)
        scaler.update()
        optimizer.zero_grad()
    return weight.detach(), met


def test_an_interrupt_before_a_fused_step_leaves_no_factor_behind() -> None:
    """The next step would divide the gradients by the scale twice."""
    code = fused.step_on_device.__code__
    lines = sorted({line for *_, line in code.co_lines() if line is not None and line > code.co_firstlineno})
    text = Path(fused.__file__).read_text(encoding="utf-8").splitlines()
    called = next(number for number, line in enumerate(text, 1) if "result = optimizer.step(" in line)
    expected, _ = trained(None)
    for line in [line for line in lines if line <= called]:
        got, met = trained(line)
        if met:
            assert torch.equal(got, expected), line
