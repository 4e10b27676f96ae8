"""The functions by which policies run ops: they do what the overload of the schema does."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from amp_core import OpPolicy, autocast, compare
from amp_core._torch.dispatcher import entry_of

ROWS = torch.tensor([[0, 3], [1, 2]])


@pytest.mark.slow
def test_each_gives_what_the_overload_gives() -> None:
    """Torch's binding takes another overload, or other defaults, and a policy changes the numbers."""
    script = Path(__file__).parent / "data" / "every_binding.py"
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_function_that_a_program_has_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy's op runs what a program has put in its place in ``torch``, an extension's kernel for one."""
    monkeypatch.setattr(torch, "exp", math.exp)
    assert entry_of(torch.ops.aten.exp.default)(torch.zeros(3)).tolist() == [1.0] * 3


@pytest.mark.parametrize("rule", ["fp32", "lower_precision_fp", "promote", "match_destination"])
def test_a_rule_for_writes_past_whole_dimensions(rule: str) -> None:
    """``x[:, rows] = values`` has None among its indices, which torch's own function refuses."""
    policy = OpPolicy.default("cpu").override({"index_put": rule, "index_put_": rule})
    written, values = torch.zeros(2, 4), torch.ones(2, 2, 2)
    with autocast("cpu", policy=policy):
        written[:, ROWS] = values
        result = torch.ops.aten.index_put(torch.zeros(2, 4), [None, ROWS], values)
    assert torch.equal(written, torch.ones(2, 4))
    assert torch.equal(result.float(), torch.ones(2, 4))


def test_a_step_that_reads_past_whole_dimensions_is_compared() -> None:
    """The backward of ``x[:, rows]`` writes by such indices, and models that gather cannot be compared."""
    weight = torch.nn.Parameter(torch.randn(4, 4))

    def step() -> torch.Tensor:
        with autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = weight[:, ROWS].matmul(torch.ones(2, 2)).float().square().mean()
        loss.backward()
        return loss

    assert compare(step, "cpu").differences
