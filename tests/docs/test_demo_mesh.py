"""The example on a mesh: four processes learn what one does."""

from __future__ import annotations

import argparse
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

SCRIPT = Path(__file__).resolve().parents[2] / "docs/examples/demo_mesh.py"


def read(out: str) -> tuple[float, list[float]]:
    found = re.search(r"scale (\S+) losses (.+)", out)
    assert found, out
    return float(found[1]), [float(loss) for loss in found[2].split()]


@pytest.mark.slow
def test_a_mesh_learns_as_one_process_does(
    torchrun: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Shards, heads or micro-batches count twice, or ranks part when one of them overflows."""
    options = ["--dp", "2", "--tp", "2", "--steps", "6", "--overflow-at", "3"]
    out = torchrun(SCRIPT, *options, ranks=4, last_word="losses")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    runpy.run_path(str(SCRIPT))["train"](argparse.Namespace(dp=1, tp=1, steps=6, overflow_at=3))
    dist.destroy_process_group()
    scale, losses = read(capsys.readouterr().out)
    ours, mesh_losses = read(out)
    assert ours == scale == 2.0**15
    assert losses[3] == losses[4]  # the overflow was skipped
    assert losses[-1] < 0.8 * losses[0]
    assert mesh_losses == pytest.approx(losses, rel=1e-3)
