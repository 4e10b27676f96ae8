"""The example on a mesh, a Llama of transformers: four processes learn what one does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed; tox -e ecosystem installs it")

SCRIPT = Path(__file__).resolve().parents[2] / "docs/examples/demo_mesh.py"
OPTIONS = "--steps 5 --overflow-at 2"


@pytest.mark.slow
def test_a_mesh_learns_as_one_process_does(forked: Callable[..., list[tuple[list[int], str]]]) -> None:
    """Shards, heads, stages or micro-batches count twice, or ranks part when one of them overflows."""
    meshes = ["1", "4 --dp 2 --tp 2", "4 --pp 2 --dp 2"]
    jobs = [f"{mesh[0]} {SCRIPT} {mesh[1:]} {OPTIONS}" for mesh in meshes]
    seen = []
    for codes, out in forked(*jobs, imports="transformers.models.llama.modeling_llama"):
        found = re.search(r"scale (\S+) losses (.+)", out)
        assert found, (codes, out)
        assert float(found[1]) == 2.0**15
        seen.append([float(loss) for loss in found[2].split()])
    alone, *others = seen
    assert alone[2] == alone[3]  # the overflow was skipped
    assert alone[-1] < 0.9 * alone[0]
    for losses in others:
        assert losses == pytest.approx(alone, rel=1e-3)
