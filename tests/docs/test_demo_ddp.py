"""The distributed example, on real processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "docs/examples/demo_ddp.py"


def torchrun(*options):
    """Run the example on two processes over gloo; return what rank 0 printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(SCRIPT), *options], capture_output=True, text=True, check=False, timeout=200
    )
    # gloo's threads let go of tensors while the interpreter ends, and may abort it (pytorch#190489).
    aborted = "terminate called without an active exception" in done.stderr and "accuracy" in done.stdout
    assert done.returncode == 0 or aborted, done.stderr
    return done.stdout


def test_two_processes_train_one_model():
    """Ranks whose gradients or scales differ would drift apart; the script checks that they do not."""
    out = torchrun("--epochs", "8", "--shard")
    found = re.search(r"accuracy (\S+) scale (\S+) ranks 2", out)
    assert found, out
    assert float(found[1]) > 0.9


def test_an_overflow_is_skipped_on_every_rank():
    """A rank that steps while another skips leaves different weights; 2**120 is far too large a scale."""
    out = torchrun(
        "--epochs", "1", "--dtype", "float16", "--batch-size", "256", "--init-scale", str(2.0**120)
    )
    scale = float(re.search(r"scale (\S+)", out)[1])
    assert scale == 2.0**116, "four steps, four overflows"
