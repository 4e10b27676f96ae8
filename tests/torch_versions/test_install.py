"""Installing amp-core beside a torch that is there already."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def test_the_metadata_admits_every_later_torch() -> None:
    """An upper bound makes pip replace the torch that a user has."""
    listed = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert listed is not None
    (bound,) = [Requirement(text).specifier for text in re.findall(r'"(torch\b.*?)"', listed[1])]
    for admitted in ("2.11.0", "2.13.0+cpu", "2.15.0", "2.16.0", "3.0", torch.__version__):
        assert bound.contains(admitted, prereleases=True), admitted
    assert not bound.contains("2.10.1")


def changes(*wanted: str) -> set[str]:
    """Return the packages that pip would install, upgrade or downgrade."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {item["metadata"]["name"] for item in json.loads(done.stdout)["install"]}


@pytest.mark.slow
def test_installing_changes_no_other_package() -> None:
    """`pip install amp-core` replaces or downgrades torch, or another package that is installed."""
    wanted = f"torch=={version('torch')}"
    assert changes(wanted, str(ROOT)) - changes(wanted) == {"amp-core"}
