"""A rank is lost in the middle of a step: what the others say, and how the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "data" / "lost.py"
PHASES = ("forward", "backward", "decision", "hang", "save")


@pytest.mark.slow
def test_the_others_end_and_the_run_resumes(
    forked: Callable[..., list[tuple[list[int], str]]], tmp_path: Path
) -> None:
    """The ranks that are left wait for ever, step alone, or leave a checkpoint that parts from the run."""
    resumed = [("decision", "--resume 2"), ("save", "--resume 2")]
    jobs = [("whole", ""), *((phase, phase) for phase in PHASES), *resumed]
    (_, whole), *lost, _, _ = forked(
        *(f"2 {SCRIPT} {tmp_path / folder} {options}" for folder, options in jobs)
    )
    assert "True" in whole
    assert "False" in whole  # the scale moved, so that a resumed run needs it
    for phase, (codes, out) in zip(PHASES, lost, strict=True):
        assert codes == [0, 7]
        error = out.splitlines()[0]
        if phase in ("decision", "hang"):
            assert error.startswith("RankLostError (1,) In step 2: Rank 0 waited for the gradients of"), error
        else:  # torch's own
            assert " None " in error, error
            assert "onnection" in error, error
    for rank in range(2):
        expected = torch.load(tmp_path / f"whole/end.False.{rank}")
        for folder in ("decision", "save"):
            torch.testing.assert_close(
                torch.load(tmp_path / folder / f"end.True.{rank}"), expected, rtol=0, atol=0
            )


@pytest.mark.slow
def test_a_window_says_in_which_step_a_rank_was_lost(
    forked: Callable[..., list[tuple[list[int], str]]],
) -> None:
    """The error names no step, so nobody knows the last good checkpoint; or earlier gradients are gone."""
    places = ["in the micro-batch", "after it"]
    for codes, out in forked(*[f"2 {SCRIPT.with_name('lost_window.py')} '{place}'" for place in places]):
        assert codes == [0, 7]
        assert out.lstrip().startswith("In step 1: Rank 0 waited for the gradients of"), out
