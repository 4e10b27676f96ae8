"""The skeleton that ``amp new-backend`` writes."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from amp_core.cli import main


def test_the_skeleton_is_whole_and_says_what_is_left(tmp_path, capsys):
    """A file would be missing, a placeholder left, or a module not be Python."""
    assert main(["new-backend", "my_npu", "--directory", str(tmp_path)]) == 0
    assert "amp check my_npu" in capsys.readouterr().out
    files = [p for p in (tmp_path / "amp-backend-my-npu").rglob("*") if p.is_file()]
    assert len(files) == 8
    for path in files:
        text = path.read_text()
        assert "$" not in text, path
        if path.suffix == ".py":
            compile(text, str(path), "exec")
    backend = tmp_path / "amp-backend-my-npu" / "amp_backend_my_npu" / "backend.py"
    assert "class MyNpuBackend(Backend)" in backend.read_text()
    assert "FILL IN" in backend.read_text()


def test_the_skeleton_of_a_missing_device_says_so(tmp_path):
    """An unfinished backend would look like a broken one."""
    main(["new-backend", "npu", "--directory", str(tmp_path)])
    scope: dict = {}
    exec((tmp_path / "amp-backend-npu" / "amp_backend_npu" / "backend.py").read_text(), scope)
    found = scope["NpuBackend"]().availability()
    assert not found
    assert "import its package" in found.reason


@pytest.mark.parametrize("folder", ["here", "two words", "-x", "~", "$HOME", "it's"])
def test_the_next_steps_can_be_copied(folder, tmp_path, monkeypatch, capsys):
    """The commands would name another folder, or an option."""
    monkeypatch.chdir(tmp_path)
    assert main(["new-backend", "npu", f"--directory={folder}"]) == 0
    steps = capsys.readouterr().out
    (grep,) = re.findall("`(.*)`", steps)
    (install,) = re.findall("pip install .*", steps)
    assert "backend.py" in subprocess.run(grep, shell=True, capture_output=True, text=True, check=True).stdout
    assert Path(shlex.split(install)[2]).resolve() == tmp_path / folder / "amp-backend-npu"


@pytest.mark.parametrize(
    "name", ["cpu", "My-NPU", "2npu", "class", "npu_", "nüp", "auto", "meta", "vulkan", "", "nn", "float16"]
)
def test_names_that_cannot_be_device_types_are_refused(name, tmp_path, capsys):
    """The package could not be imported, or would fight amp-core's own backend."""
    assert main(["new-backend", name, "--directory", str(tmp_path)]) == 2
    words = capsys.readouterr().err
    assert repr(name) in words or f"torch.{name} is something else" in words
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_is_named(tmp_path, capsys):
    """The answer to a mistyped folder would be a traceback."""
    (tmp_path / "notes").write_text("")
    for folder in ("notes", "a" * 300):
        assert main(["new-backend", "npu", "--directory", str(tmp_path / folder)]) == 2
        assert "cannot be written" in capsys.readouterr().err


def test_nothing_is_overwritten(tmp_path, capsys):
    """Somebody's work would be lost."""
    assert main(["new-backend", "npu", "--directory", str(tmp_path)]) == 0
    assert main(["new-backend", "npu", "--directory", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
