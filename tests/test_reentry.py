"""Programs that run between two lines of another one, as signal handlers and finalizers do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "data" / "reentry.py"


@pytest.mark.parametrize("program", ["casts", "recorded"])
def test_a_program_inside_another_one(program: str) -> None:
    """A lock that is held for a moment would stop the process, and shared state would give wrong numbers."""
    command = [sys.executable, str(PROGRAMS), program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
