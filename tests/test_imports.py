"""The directions in which the parts of amp-core import each other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).parents[1]

pytest.importorskip("importlinter")

TURNED_ROUND = {
    "upwards": ("states/loss_scale.py", "from amp_core.plugin.manager import Manager\n", "layers"),
    "upwards, for types": (
        "kernels/interface.py",
        "if __debug__:\n    from amp_core.plugin.interface import Backend\n",
        "layers",
    ),
    "a circle inside a function": (
        "debugging/tables.py",
        "def late() -> None:\n    import amp_core.debugging.report\n",
        "circles",
    ),
    "across": ("casts/scope.py", "import amp_core.scaling.grad_scaler\n", "regions"),
}


def lint(folder: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"
    options = [f"--contract={contract}" for contract in contracts]
    command = [sys.executable, "-c", program, "--no-cache", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the core and its contracts."""
    shutil.copytree(TREE / "amp_core", tmp_path / "amp_core", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TREE / "pyproject.toml", tmp_path)
    return tmp_path


def test_imports_go_downwards(tree: Path) -> None:
    """A part imports another that stands above it, or two files import each other."""
    done = lint(tree)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("how", TURNED_ROUND)
def test_an_import_that_is_turned_round_is_seen(tree: Path, how: str) -> None:
    """The check of the directions passes whatever is imported."""
    name, text, contract = TURNED_ROUND[how]
    path = tree / "amp_core" / name
    path.write_text(path.read_text() + text)
    assert lint(tree, contract).returncode == 1
