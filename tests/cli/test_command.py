"""The ``amp`` command as a whole: its help, its start-up, and the small subcommands."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

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


def test_env_tells_why_there_are_no_kernels() -> None:
    """A bug report lists the device as available and leaves out the setting that breaks it."""
    command = [sys.executable, "-m", "amp_core", "env"]
    variables = {**os.environ, "AMP_COMPILED": "maybe"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    assert re.search("  cpu: available; .*AMP_COMPILED='maybe' is not a switch", done.stdout)


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
    assert main(["check", "auto", "--area", "scaler", "-k", "nosuch"]) == 1
    out = capsys.readouterr().out
    assert "no check ran; -k 'nosuch' matches none of the chosen areas' checks" in out


@pytest.mark.parametrize("options", [[], ["-u"]])
@pytest.mark.parametrize("command", [["policy", "--long"], ["backends"]])
def test_a_reader_may_leave(command: list[str], options: list[str]) -> None:
    """``amp backends | head`` ends in a traceback, or blames a file for a broken pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, *options, "-m", "amp_core", *command],
            stdout=pipe,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_program_keeps_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of `main` changes how the program shows letters, or raises when its reader leaves."""
    reader, writer = os.pipe()
    os.close(reader)
    in_memory = io.TextIOWrapper(io.BytesIO(), "ascii")
    with open(writer, "w", encoding="ascii") as pipe:
        for stream in (in_memory, pipe):
            monkeypatch.setattr(sys, "stdout", stream)
            assert main(["completion", "bash"]) == 0
            assert sys.stdout is stream
            assert stream.errors == "strict"
    assert in_memory.tell() > 0


@pytest.fixture
def full_disk() -> Path:
    """A file that takes nothing, of Linux."""
    file = Path("/dev/full")
    if not file.exists():
        pytest.skip("no device that is always full")
    return file


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", [["policy", "--long"], ["backends"], ["--help"]])
def test_an_output_that_takes_nothing(
    command: list[str], unbuffered: str, full_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk ends in a traceback, or goes unnoticed."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with full_disk.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "amp_core", *command],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert re.fullmatch(r"amp( \w+)?: standard output cannot be written: .+\.\n", done.stderr)


def test_a_reader_that_leaves_does_not_change_the_verdict() -> None:
    """``amp check ... | head`` succeeds with ``pipefail`` where a check fails, or the other way round."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        command = [sys.executable, "-m", "amp_core", "check", "cpu", "--area", "scaler", "-k", "nosuch"]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("option", ["--badge", "--junit", "--markdown"])
def test_a_report_needs_a_name(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty variable in a script leaves out the report, and nothing says so."""
    assert main(["check", "cpu", "--area", "availability", option, ""]) == 2
    assert "no report can be written to '': its name is empty" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--badge", "--junit", "--markdown"])
def test_a_report_on_a_full_disk_is_one_line(
    option: str, full_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends in a traceback of many lines that does not name the file."""
    assert main(["check", "cpu", "--area", "availability", option, str(full_disk)]) == 2
    assert capsys.readouterr().err == f"amp check: {full_disk} cannot be written: No space left on device.\n"


def test_a_picture_on_a_full_disk_is_one_line(
    full_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo ends in a traceback of matplotlib's that does not name the file."""
    pytest.importorskip("sklearn")
    picture = tmp_path / "curves.png"
    picture.symlink_to(full_disk)
    options = ["--epochs", "1", "--model", "mlp", "--batch-size", "1000", "--device", "cpu"]
    assert main(["demo", *options, "--output", str(picture)]) == 2
    assert capsys.readouterr().err == (
        f"amp demo: --output {picture} cannot be written: No space left on device.\n"
    )


def test_check_without_a_console(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without standard error, as under ``2>&-``, the kit ends before its first check, and says nothing."""
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["check", "cpu", "--area", "availability"]) == 0


REASON = """
import sys, torch
from amp_core.cli import main
from amp_core.plugin import Availability, get_backend, replace_backend

class Backend(type(get_backend("cpu"))):
    def availability(self):
        return Availability(True, "1 µs")

replace_backend(Backend())
raise SystemExit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", [["backends"], ["env"]])
def test_a_terminal_may_lack_letters(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One letter of a plugin's reason hides all backends behind a UnicodeEncodeError."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setenv("COLUMNS", "200")
    done = subprocess.run(
        [sys.executable, "-c", REASON, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert r"1 \xb5s" in done.stdout


@pytest.mark.parametrize(
    ("variable", "value", "command"),
    [
        ("AMP_PLUGIN_AUTOLOAD", "maybe", ["backends"]),
        ("AMP_PLUGIN_AUTOLOAD", "maybe", ["env", "--json"]),
        ("AMP_COMPILED", "maybe", ["demo", "--epochs", "1", "--model", "mlp"]),
        ("AMP_POLICY", "nosuch.toml", ["demo", "--epochs", "1", "--model", "mlp"]),
    ],
)
def test_a_wrong_setting_is_one_line(variable: str, value: str, command: list[str], tmp_path: Path) -> None:
    """The user's own setting ends in a traceback, or is called a bug of a plugin to report to its authors."""
    pytest.importorskip("sklearn")
    done = subprocess.run(
        [sys.executable, "-m", "amp_core", *command],
        env={**os.environ, variable: value},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"amp {command[0]}: {variable}")
    assert value in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--junit", "."], "no report can be written to .: Is a directory."),
        (["--markdown", "/proc/r.md"], "no report can be written to /proc/r.md: "),
        (["--fixtures", "..:Mine"], "..:Mine names no fixtures"),
    ],
)
def test_a_wrong_option_of_check_is_one_line(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kit runs for minutes, and its report is lost in a traceback; or another option is named."""
    assert main(["check", "cpu", "--area", "availability", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"amp check: {words}")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('no device here')", "RuntimeError: no device here"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import pytest; pytest.importorskip('no_such_device')", "Skipped: could not import"),
        ("class Mine(:", "SyntaxError: "),
        ("def __getattr__(name): raise KeyError(name)", "KeyError: 'Mine'"),
    ],
)
def test_fixtures_that_cannot_be_loaded_are_one_line(
    code: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A module of fixtures that raises gives a traceback; one that exits ends the command as a success."""
    (tmp_path / "fixtures_that_fail.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fixtures_that_fail", raising=False)
    assert main(["check", "cpu", "--fixtures", "fixtures_that_fail:Mine"]) == 2
    assert f"fixtures_that_fail:Mine names no fixtures, as package.module:Class does: {message}" in (
        capsys.readouterr().err
    )
