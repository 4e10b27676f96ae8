"""``amp policy``, as users run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from amp_core import OpPolicy
from amp_core.cli import main


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["policy", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps"])
def test_all_rules_of_a_device(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A rule is left out, or that of another device is shown."""
    rows = json.loads(output(capsys, device, "--json"))
    assert {row["op"]: row["rule"] for row in rows} == dict(OpPolicy.default(device))
    text = output(capsys, device)
    assert f"{len(rows)} rules" in text
    words = set(text.split())
    assert {row["op"].removeprefix("aten::").removesuffix(".default") for row in rows} <= words
    long = output(capsys, device, "--long").splitlines()
    assert [line.split()[:2] for line in long[:-1]] == [[row["op"], row["rule"]] for row in rows]


def test_the_overview_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules scroll past as a hundred long lines."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = output(capsys, "cpu").splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 60


def test_one_op(capsys: pytest.CaptureFixture[str]) -> None:
    """The answer to "why is softmax in float32" is wrong or has no origin."""
    rows = json.loads(output(capsys, "cuda", "--op", "softmax", "--json"))
    assert {k: rows[0][k] for k in ("op", "rule")} == {
        "op": "aten::softmax.int",
        "rule": "fp32_set_opt_dtype",
    }
    assert rows[0]["origin"]
    assert "fp32_set_opt_dtype" in output(capsys, "cuda", "--op", "softmax")


def test_difference_of_two_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """The ops that two devices treat differently are not those of `OpPolicy.diff`."""
    rows = json.loads(output(capsys, "--diff", "cpu", "cuda", "--json"))
    wanted = OpPolicy.default("cpu").diff(OpPolicy.default("cuda"))
    assert {row["op"]: (row["cpu"], row["cuda"]) for row in rows} == wanted
    assert f"{len(wanted)} ops differ" in output(capsys, "--diff", "cpu", "cuda")


def test_a_file_and_the_variable(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, or `AMP_POLICY`, is shown without its line, or not at all."""
    path = tmp_path / "mine.toml"
    path.write_text('device_type = "cpu"\n[rules]\nmm = "fp32"\n')
    assert f"{path}:3" in output(capsys, str(path), "--op", "mm")
    assert "lower_precision_fp" in output(capsys, "cpu", "--op", "mm")
    monkeypatch.setenv("AMP_POLICY", str(path))
    assert f"{path}:3" in output(capsys, "cpu", "--op", "mm")


def test_a_variable_that_names_no_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`[Errno 2]`, which does not say what to do."""
    monkeypatch.setenv("AMP_POLICY", "nowhere.toml")
    assert main(["policy", "cpu"]) == 2
    text = (
        "AMP_POLICY names nowhere.toml, which cannot be read: No such file or directory. Correct it, or unset"
    )
    assert text in capsys.readouterr().err


def test_auto_is_the_device_that_is_present(capsys: pytest.CaptureFixture[str]) -> None:
    """A package that adds the device 'auto' is asked for."""
    present = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    assert output(capsys, "auto") == output(capsys, present.type)


def test_uniform_is_the_same_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    """``--uniform`` shows the device's own rules."""
    assert "0 ops differ" in output(capsys, "--diff", "cpu", "cuda", "--uniform")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["cuda", "--op", "softmaks"], "softmax"),
        (["cpu", "--op", "m\udcff"], r"has no op 'm\udcff'"),  # as Python reads the byte 0xff
        (["npu9"], "npu9"),
        (["./nowhere.toml"], "nowhere.toml cannot be read: No such file or directory."),
        (["cpu", "--diff", "cpu", "cuda"], "cannot be combined with another policy"),
        ([""], "by the type of its device, such as 'cuda', without an index."),
        (["cpu", "--op", "mm", "--like", "cuda"], "--like OTHER needs --missing"),
        (["nowhere.toml", "--uniform"], "--uniform replaces the policy of a device type, and only files"),
        (["--diff", "a.toml", "b.toml", "--uniform"], "--uniform replaces the policy of a device type"),
    ],
)
def test_bad_input(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake ends in a traceback, or in exit code 0."""
    assert main(["policy", *arguments]) == 2
    message = capsys.readouterr().err
    assert text in message
    assert "Errno" not in message


@pytest.mark.parametrize("one", [["--op", "mm"], ["--diff", "cpu", "cuda"], ["--long"]])
def test_two_questions_at_once_are_refused(one: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One of the two options does nothing, and the answer looks like that to both."""
    with pytest.raises(SystemExit) as caught:
        main(["policy", *one, "--missing"])
    assert caught.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_missing_rules(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A heavy op without a rule is left out, or one with a rule is listed."""
    monkeypatch.setenv("COLUMNS", "80")
    kinds = json.loads(output(capsys, "cpu", "--missing", "--json"))
    assert kinds["aten::mv.default"] == "matrix product"
    assert kinds["aten::_softmax.default"] == "reduction"
    assert not kinds.keys() & {op for op, _ in OpPolicy.default("cpu")}
    lines = output(capsys, "cpu", "--missing").splitlines()
    assert lines[-1].startswith(f"{len(kinds)} heavy ops have no rule for cpu in torch")
    assert "mv" in " ".join(lines).split()
    assert max(map(len, lines)) <= 80
    assert "aten::mv.default" not in json.loads(output(capsys, "cuda", "--missing", "--json"))


def test_rules_that_only_another_device_has(capsys: pytest.CaptureFixture[str]) -> None:
    """A maker of a device would compare two lists by hand to see which rules his own lacks."""
    missing = json.loads(output(capsys, "cpu", "--missing", "--like", "cuda", "--json"))
    assert missing["aten::sum.default"] == "fp32_set_opt_dtype"
    cpu, cuda = OpPolicy.default("cpu"), OpPolicy.default("cuda")
    assert missing == {op: rule for op, rule in cuda if op not in cpu.rules}
    text = output(capsys, "cpu", "--missing", "--like", "cuda")
    assert f"{len(missing)} ops have a rule on cuda and none on cpu" in text
    line = text.splitlines()[-1].partition(": ")[2]
    assert eval(line, {"OpPolicy": OpPolicy}) == OpPolicy("cpu", cuda.rules)
    assert main(["policy", "cpu", "--like", "cuda"]) == 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rules_that_only_a_file_has(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line that gives a device the rules of a file gives it those of torch's default instead."""
    path = tmp_path / "mine.toml"
    path.write_text(f'device_type = "{device}"\n[rules]\nrelu = "fp32"\nmm = "lower_precision_fp"\n')
    text = output(capsys, "cpu", "--missing", "--like", str(path))
    assert f"a rule in {path} and none on cpu" in text
    line = text.splitlines()[-1].partition(": ")[2]
    assert eval(line, {"OpPolicy": OpPolicy}) == OpPolicy("cpu", OpPolicy.from_toml(path).rules)
    text = output(capsys, str(path), "--missing", "--like", "xpu", "--uniform")
    assert f"a rule on xpu and none in {path}" in text
    line = text.splitlines()[-1].partition(": ")[2]
    assert eval(line, {"OpPolicy": OpPolicy}) == OpPolicy(device, OpPolicy.uniform("xpu").rules)
