"""Ranks that share parameters take the same step: real processes over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import amp_core

SCRIPT = Path(__file__).parent / "data" / "ranks.py"


@pytest.mark.parametrize(
    ("scenes", "count"),
    [
        ("plain beyond bucket_views delayed", 2),
        pytest.param("fsdp fsdp1 overlap reduced", 2, marks=pytest.mark.slow),
        pytest.param("groups", 3, marks=pytest.mark.slow),
        pytest.param("mesh slices decision", 4, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_take_the_same_step(torchrun: Callable[..., str], scenes: str, count: int) -> None:
    """Ranks step on their own flag or norm and part for good; replicas are counted twice."""
    assert torchrun(SCRIPT, *scenes.split(), ranks=count).count("all is well") == count


@pytest.mark.slow
def test_the_others_end_when_a_rank_dies() -> None:
    """The ranks that are left wait for ever, or step alone. No launcher is there that would end them."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    left, dying = (
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "gone"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**env, "RANK": str(rank)},
        )
        for rank in range(2)
    )
    out, err = left.communicate(timeout=120)
    dying.communicate(timeout=120)
    assert dying.returncode == 7
    assert left.returncode == 0, err[-3000:]
    assert "the other is gone" in out


@pytest.mark.parametrize("wrong", ["world", 2, object()])
def test_what_is_no_process_group_is_refused_at_once(wrong: object) -> None:
    """The first step fails with an AttributeError, hours into a job."""
    with pytest.raises(TypeError, match=r"process_group must be a torch\.distributed\.ProcessGroup"):
        amp_core.GradScaler("cpu", process_group=wrong)
