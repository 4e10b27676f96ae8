"""torchtitan over amp-core: its own training of its debug Llama, on processes of gloo."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed; tox -e torchtitan installs it", allow_module_level=True)

SCRIPT = Path(__file__).parent / "data" / "titan.py"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank of each scene saw: importing torchtitan takes most of the time."""
    folder = tmp_path_factory.mktemp("titan")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.json")):
        found.setdefault(path.name.split(".")[0], []).append(json.loads(path.read_text()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["mesh", "pipeline"])
def test_float16_learns_as_float32_does(seen: dict[str, list[Any]], scene: str) -> None:
    """A loss, a norm or a gradient keeps its scale, or counts twice; ranks part at an overflow of one."""
    (plain,), ranks = seen["plain"], seen[scene]
    for rank in ranks:
        assert rank["skipped"] == [False, True, False, False]
        assert (rank["scale"], rank["rates"], rank["step"]) == (2.0**15, 3, 4)
        assert not math.isfinite(rank["norms"].pop(1))
    last = ranks[-1]["losses"]  # the first stage of a pipeline sees none
    assert last.pop(1) == last[1]
    assert last == pytest.approx(plain["losses"][:3], rel=2e-3)
    assert ranks[-1]["norms"] == pytest.approx(plain["norms"][:3], rel=2e-2)
    assert len({rank["last"] for rank in ranks}) == (1 if scene == "mesh" else 2)


@pytest.mark.slow
def test_float32_is_torchtitans_own(seen: dict[str, list[Any]]) -> None:
    """Without float16, the class changes the training all the same."""
    for key in ("losses", "norms", "last"):
        assert seen["disabled"][0][key] == seen["plain"][0][key]


@pytest.mark.slow
def test_what_would_have_no_effect_is_refused(seen: dict[str, list[Any]]) -> None:
    """A setting is ignored in silence."""
    graphs, output, rules, another = seen["refused"][0]["said"]
    assert "disable_cuda_graphs" in graphs
    assert "output_dtype" in output
    assert "rules for ops" in rules
    assert "torchtitan 0.4.0 is installed" in another
