"""Programs that run between two lines of another one, as signal handlers and finalizers do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .drawn import TIMES

PROGRAMS = Path(__file__).parent / "data" / "reentry.py"


@pytest.mark.parametrize("program", ["casts", "recorded"])
def test_a_program_inside_another_one(program: str) -> None:
    """A lock that is held for a moment would stop the process, and shared state would give wrong numbers."""
    command = [sys.executable, str(PROGRAMS), program]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * TIMES, check=False, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
