"""The ``amp`` command as a whole: its help, its start-up, and the small subcommands."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import amp_core
from amp_core.cli import COMMANDS, build_parser, main


def test_help_needs_no_torch() -> None:
    """``amp --help`` takes seconds, because something imports torch."""
    code = "import sys; from amp_core.cli import main; main([]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "``" not in done.stdout, "the text is for users, not from a docstring"


def test_every_subcommand_has_options_and_help() -> None:
    """A subcommand is listed that cannot be imported."""
    text = build_parser().format_help()
    for name, command in COMMANDS.items():
        assert name in text
        assert command.help


def test_env_tells_what_a_bug_report_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report lacks a version, a device or a setting."""
    monkeypatch.setenv("AMP_TRITON", "0")
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["packages"]["amp-core"] == amp_core.__version__
    assert facts["devices"]["cpu"].startswith("available")
    assert facts["settings"]["AMP_TRITON"] == "0"
    assert main(["env"]) == 0
    assert "  AMP_TRITON: 0" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_every_subcommand(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script of a shell lacks a subcommand, or an option of one."""
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    assert "batch-size" in script


def test_a_check_that_runs_nothing_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped name ends in "does not pass", as if the backend were wrong."""
    assert main(["check", "cpu", "--area", "scaler", "-k", "nosuch"]) == 1
    out = capsys.readouterr().out
    assert "no check ran; -k 'nosuch' matches none of the chosen areas' checks" in out
