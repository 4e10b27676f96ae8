"""A device whose Autocast key is bare: PrivateUse1, made in Python, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "data" / "bare_device.py"


def test_policy_on_a_device_that_has_no_rules() -> None:
    """A new device must get mixed precision from Python alone; see the script for what is checked."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all checks passed"
