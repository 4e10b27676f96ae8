"""The wheels that cibuildwheel builds. `tox run -e wheel` installs it; elsewhere these tests are skipped."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

pytest.importorskip("cibuildwheel", reason="tox run -e wheel installs cibuildwheel")
ROOT = Path(__file__).parents[2]
WHEELS = {
    "linux": ["manylinux_x86_64", "manylinux_aarch64"],
    "macos": ["macosx_arm64"],
    "windows": ["win_amd64"],
}


@pytest.mark.parametrize("platform", WHEELS)
def test_one_wheel_per_platform(platform: str) -> None:
    """A platform gets no wheel, or one for each Python, though the kernels are bound to none."""
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", platform]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"cp312-{name}" for name in WHEELS[platform]]


def test_the_options_exist() -> None:
    """A misspelt option is found where it hurts: in the release, on a machine that nobody has here."""
    jsonschema = pytest.importorskip("jsonschema")
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    schema = json.loads(
        resources.files("cibuildwheel").joinpath("resources/cibuildwheel.schema.json").read_text()
    )
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    jsonschema.validate(options, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**options, "test-comand": "pytest"}, schema)
