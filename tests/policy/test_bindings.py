"""The functions by which policies run ops: they do what the overload of the schema does."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from amp_core._torch.dispatcher import entry_of


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
