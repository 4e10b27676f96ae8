"""Weight casts under DistributedDataParallel, on real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("data") / "ddp.py"


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["cached_casts", "master_weights"])
@pytest.mark.parametrize("unused", ["find", "all"])
def test_gradients_are_reduced(scope: str, unused: str) -> None:
    """Gradients bypass the reducer: the ranks drift apart, or DDP waits for what never comes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(SCRIPT), scope, unused], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("same") == 2
