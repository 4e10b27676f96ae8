"""Ranks that share parameters take the same step: real processes over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "data" / "ranks.py"


def ranks(scene: str, count: int) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return subprocess.run(
        [*launcher, str(SCRIPT), scene],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("scene", "count"),
    [
        ("plain", 2),
        pytest.param("overlap", 2, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, marks=pytest.mark.slow),
        pytest.param("mesh", 4, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_take_the_same_step(scene: str, count: int) -> None:
    """Ranks step on their own flag or norm and part for good; replicas are counted twice."""
    done = ranks(scene, count)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all is well") == count


@pytest.mark.slow
def test_the_others_end_when_a_rank_dies() -> None:
    """The ranks that are left wait for ever in the collective."""
    done = ranks("gone", 2)
    assert done.returncode != 0
    assert "all is well" not in done.stdout
