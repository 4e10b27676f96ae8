"""``amp backends``, ``amp --version`` and ``python -m amp_core``, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest
import torch

import amp_core
from amp_core import Recipe
from amp_core.cli import COMMANDS, main
from amp_core.cli.tables import print_table
from amp_core.testing import Loopback
from amp_core.testing.fixtures import serving

ROW = {
    "device",
    "status",
    "reason",
    "plugin",
    "distribution",
    "version",
    "path",
    "default_dtype",
    "supported_dtypes",
    "kernels",
    "kernels_reason",
    "native_formats",
    "emulated_formats",
}


def amp(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    start = "import sys; sys.argv[0] = 'amp'\nfrom amp_core.cli import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", start, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, object]]:
    """What ``--json`` prints, by device type; all GPUs are hidden, which changes nothing on a CPU build."""
    done = amp("backends", "--json", CUDA_VISIBLE_DEVICES="", AMP_DISABLE_BACKENDS="xpu")
    assert done.returncode == 0, done.stderr
    return {row["device"]: row for row in json.loads(done.stdout)["backends"]}


def test_json_has_every_column(rows: dict[str, dict[str, object]]) -> None:
    """A script that reads the listing misses a field on some rows."""
    assert {"cpu", "cuda", "xpu", "mps"} <= set(rows)
    assert all(set(row) == ROW for row in rows.values())


def test_the_cpu_row_says_what_the_cpu_does(rows: dict[str, dict[str, object]]) -> None:
    """The listing does not say what a region or scaler would use."""
    cpu = rows["cpu"]
    assert (cpu["status"], cpu["default_dtype"], cpu["distribution"]) == ("available", "bfloat16", "amp-core")
    assert set(cpu["supported_dtypes"]) == {"bfloat16", "float16"}
    assert cpu["kernels"]
    assert os.path.isdir(str(cpu["path"]))
    assert cpu["native_formats"] == []
    formats = cpu["emulated_formats"]
    assert isinstance(formats, dict)
    assert set(formats) == set(Recipe.names())
    assert set(formats["nvfp4"]) == {"output", "grad_input", "grad_weight"}


def test_reasons_say_why(rows: dict[str, dict[str, object]]) -> None:
    """A device that is not there, or is switched off, does not say why."""
    assert (rows["xpu"]["status"], rows["xpu"]["reason"]) == ("disabled", "AMP_DISABLE_BACKENDS names it")
    reason = str(rows["cuda"]["reason"])
    assert rows["cuda"]["status"] == "absent"
    if torch.version.cuda is None and torch.version.hip is None:
        assert "is built without CUDA and ROCm" in reason
    else:
        assert "no NVIDIA driver is installed" in reason or "CUDA_VISIBLE_DEVICES= hides all" in reason


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The table cannot be printed, or lacks what ``--json`` has."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["backends"]) == 0
    printed = capsys.readouterr().out
    listed = ("cpu: kernels: ", "cpu: native formats: none", "emulated: fp8_tensorwise, fp8_rowwise")
    for text in ("cpu", "available", "bfloat16, float16", "amp-core", "amp_backend_cpu", *listed):
        assert text in printed


def test_a_narrow_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns for which there is no room are empty, that of the device among them."""
    monkeypatch.setenv("COLUMNS", "30")
    assert main(["backends"]) == 0
    out = capsys.readouterr().out
    assert "device: cpu\n  status: available\n  dtypes (default first): bfloat16, float16\n" in out


def test_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of the table, or the variable that pins streaming stores, is broken into pieces."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["backends"]) == 0
    out = capsys.readouterr().out
    cpu = next(line for line in out.splitlines() if "available" in line)
    assert all(text in cpu for text in ("cpu", "bfloat16, float16", "amp-core"))
    kernels = amp_core.get_backend("cpu").kernels()
    assert f"cpu: kernels: {kernels.reason}\n" in out


@pytest.mark.parametrize("hook", ["kernels", "default_dtype"])
def test_the_error_of_a_hook_that_failed(hook: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error of a plugin's hook is nowhere, in several lines, or said of kernels that are right."""

    def fail(_: Loopback) -> None:
        raise OSError("no driver:\nlibnpu.so")

    with serving(type("Broken", (Loopback,), {hook: fail})()):
        assert main(["backends"]) == 0
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if "Broken" in line)
    assert line.startswith(f"cpu: BackendError: Broken.{hook}()")
    assert "no driver: libnpu.so. This is a bug in that plugin" in line
    assert "cpu: native formats: none" not in printed  # nobody has asked


def test_brackets_in_a_title_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    """`amp check` loses a part of what a device says of itself, or ends in a traceback after minutes."""
    print_table("npu: Npu ([red]/dev/npu0[/])", ["an area of the kit with a long name"], [["[/cast]"]])
    printed = capsys.readouterr().out
    assert "npu: Npu ([red]/dev/npu0[/])" in printed
    assert "[/cast]" in printed


def test_without_rich_the_table_is_plain(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain install, without the extra, cannot list its backends."""
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "amp-core backends"
    assert lines[1].split() == [
        "device",
        "status",
        "dtypes",
        "(default",
        "first)",
        "kernels",
        "from",
    ]
    start = lines[1].index("dtypes")
    cpu = next(line for line in lines if line.startswith("cpu "))
    assert cpu[start:].startswith("bfloat16, float16"), "the columns are aligned"


def test_module_version_and_help() -> None:
    """``python -m amp_core`` is not ``amp backends``, or versions and commands are not listed."""
    done = subprocess.run([sys.executable, "-m", "amp_core"], capture_output=True, text=True, check=True)
    assert "amp-core backends" in done.stdout
    version = amp("--version").stdout
    assert version.startswith("amp-core ")
    assert f"torch {metadata.version('torch')}, pluggy {metadata.version('pluggy')}" in version
    help_text = amp("--help").stdout
    for command in COMMANDS:
        assert command in help_text
