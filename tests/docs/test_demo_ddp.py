"""The distributed example, on real processes."""

from __future__ import annotations

import re
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "docs/examples/demo_ddp.py"


def test_two_processes_train_one_model(on_ranks):
    """Ranks whose gradients or scales differ would drift apart; the script checks that they do not."""
    out = on_ranks(SCRIPT, "--epochs", "8", "--shard")
    found = re.search(r"accuracy (\S+) scale (\S+) ranks 2", out)
    assert found, out
    assert float(found[1]) > 0.9


def test_an_overflow_is_skipped_on_every_rank(on_ranks):
    """A rank that steps while another skips leaves different weights; 2**120 is far too large a scale."""
    options = ["--epochs", "1", "--dtype", "float16", "--batch-size", "256", "--init-scale", str(2.0**120)]
    out = on_ranks(SCRIPT, *options)
    scale = float(re.search(r"scale (\S+)", out)[1])
    assert scale == 2.0**116, "four steps, four overflows"
