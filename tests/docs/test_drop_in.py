"""What the documentation promises first: a script changes its import, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("data") / "train_with_torch_amp.py"


def run(source):
    """Run the script text in its own process; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_training_script_gives_the_same_bits_with_its_import_changed():
    """Accumulation, clipping, skipped steps and growth: any difference in arithmetic would show."""
    source = SCRIPT.read_text()
    changed = source.replace("from torch.amp import", "from amp_core import")
    assert changed != source
    torch_amp, ours = run(source), run(changed)
    assert len(set(torch_amp["scales"])) > 3, "the script must meet overflows and growth"
    assert torch_amp["losses"][-1] < torch_amp["losses"][0]
    assert ours == torch_amp
