"""`amp demo`, as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from amp_core import GradScaler
from amp_core.cli import demo, main
from amp_core.demo.data import load_digits
from amp_core.demo.report import verdict
from amp_core.demo.train import History, Settings, Trainer, train
from amp_core.testing import Loopback
from amp_core.testing.fixtures import serving

CPU = torch.device("cpu")


def amp_demo(capsys, *options):
    """Run the command in this process; return its exit code, output and error lines."""
    code = main(["demo", *map(str, options)])
    out, err = capsys.readouterr()
    return code, out, err


def test_it_trains_compares_and_leaves_a_picture(tmp_path, capsys):
    """The main job: both runs learn, agree within a point, and the table and the picture appear."""
    code, out, err = amp_demo(capsys, "--device", "cpu", "--output", tmp_path / "curves.png")
    assert code == 0, err
    rows = {line.split("│")[1].strip(): line.split("│")[2:4] for line in out.splitlines() if "│" in line}
    full, mixed = (float(cell.strip().rstrip("%")) for cell in rows["test accuracy"])
    assert full > 95
    assert abs(full - mixed) < 1
    assert "advised: " in out
    assert "timed each op in both precisions" in " ".join(out.split())
    casts, more_casts = (int(cell) for cell in rows["casts per step"][:2])
    assert (casts, more_casts > 0) == (0, True)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"SGD skipped step 0: inf or NaN at scale 65536 in .*5\.weight", out)
    assert "begins: linear in 5" in out


@pytest.mark.parametrize(
    ("mixed", "words"), [(True, "with its policy a step took 0.50"), (False, "by chance")]
)
def test_advice_to_stay_in_float32_is_no_gain(mixed, words):
    """The time of the third run is given as a gain although it is the first run once more."""
    full, low = History("float32", False, seconds=[2.0]), History("AMP", True, seconds=[3.0])
    text = verdict(full, low, History("advised", mixed, seconds=[1.0]))
    assert words in text
    assert ("0.50" in text) == mixed


def test_float16_skips_a_step_and_still_learns():
    """An overflow of the scaled float16 gradients must cost a step and halve the scale, no more."""
    trainer = Trainer(Settings(CPU, torch.float16, model="mlp", epochs=4), load_digits(), mixed=True)
    trainer.scaler = GradScaler("cpu", init_scale=2.0**40)
    (history,) = train([trainer], lambda _: None)
    assert history.skipped[0] == 0
    assert history.scales[1] == history.scales[0] / 2
    assert history.accuracy > 0.5
    assert history.losses[-1] < history.losses[0]


def test_watching_a_step_does_not_change_the_training():
    """The counted step would give one of the two runs a head start."""
    digits = load_digits()
    settings = Settings(CPU, torch.bfloat16, model="mlp", epochs=1)
    watched, plain = trainers = [Trainer(settings, digits, mixed=True) for _ in range(2)]
    watched.watch()
    train(trainers, lambda _: None)
    assert watched.history.losses == plain.history.losses
    weights = sum(p.nbytes for p in plain.model.parameters())
    assert watched.history.peak_bytes > 2 * weights, "weights and gradients are both alive"


def test_the_runs_take_turns():
    """Runs one after the other would be compared while other work on the machine changes."""
    settings, digits = Settings(CPU, torch.bfloat16, model="mlp", epochs=1), load_digits()
    trainers = [Trainer(settings, digits, mixed) for mixed in (False, True)]
    order = []
    train(trainers, lambda history: order.append(history.name))
    turn = ["float32", "AMP (bfloat16)"]
    assert order == (turn + turn[::-1]) * (len(order) // 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "gpu"], "gpu"),
        (["--device", "cpu", "--dtype", "float99"], "float99"),
        (["--device", "cpu", "--dtype", "int8"], "bfloat16"),
        (["--device", "cpu", "--output", "/no/such/folder/a.png"], "No such file or directory"),
        (["--device", "cpu", "--output", "a.txt"], "png"),
        (["--device", "cpu", "--batch-size", "5000"], "1198"),
        pytest.param(
            ["--device", "cuda"],
            "cuda cannot be used",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA"),
        ),
    ],
)
def test_what_cannot_work_is_one_line_before_the_training(options, words, capsys, monkeypatch):
    """A user would wait for a training only to get a traceback."""
    monkeypatch.setattr(demo, "_train", lambda *_: pytest.fail("the training began"))
    code, out, err = amp_demo(capsys, *options)
    assert code == 2
    assert words in err
    assert err.startswith("amp demo: ")
    assert err.count("\n") == 1
    assert not out


class OtherDefault(Loopback):
    """Its default dtype is not one of its dtypes, as on a device of torch's that has bfloat16 alone."""

    def supported_dtypes(self):
        return (torch.bfloat16,)

    def default_dtype(self):
        return torch.float16


class WrongDtypes(Loopback):
    """A plugin with a fault."""

    def supported_dtypes(self):
        return [torch.bfloat16]


@pytest.mark.parametrize(
    ("backend", "words"),
    [(OtherDefault, "the default dtype: torch.float16 is not"), (WrongDtypes, "returned [torch.bfloat16]")],
)
def test_a_backend_that_is_at_fault_is_one_line(backend, words, capsys, monkeypatch):
    """The demo would train in float32, and then end in a traceback."""
    monkeypatch.setattr(demo, "_train", lambda *_: pytest.fail("the training began"))
    with serving(backend()):
        code, _, err = amp_demo(capsys, "--device", "cpu")
    assert code == 2
    assert words in err
    assert err.startswith("amp demo: ")
    assert err.count("\n") == 1


def test_missing_extras_are_named(capsys, monkeypatch):
    """Without the extra, an ImportError would name a module that is not the package to install."""
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "sklearn" else object())
    code, _, err = amp_demo(capsys)
    assert code == 2
    assert "scikit-learn" in err
    assert "amp-core[demo]" in err


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_count_must_be_positive(value, capsys):
    """Zero epochs would divide by nothing after the checks."""
    with pytest.raises(SystemExit) as caught:
        amp_demo(capsys, "--epochs", value)
    assert caught.value.code == 2
    assert "_" not in capsys.readouterr().err.splitlines()[-1], "a name of the code"


@pytest.mark.parametrize("value", ["-5", "4294967296", "many"])
def test_a_seed_must_be_one_that_numpy_takes(value, capsys):
    """The split of the data would end in a traceback."""
    with pytest.raises(SystemExit) as caught:
        amp_demo(capsys, "--seed", value)
    assert caught.value.code == 2
    assert "--seed" in capsys.readouterr().err


def test_it_runs_as_a_command(tmp_path):
    """`python -m amp_core demo` must work without a terminal and warn about nothing."""
    words = ["demo", "--model", "mlp", "--epochs", "1", "--output", str(tmp_path / "[red]a.png")]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "amp_core", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "[red]a.png").exists()
    assert f"Loss and scale curves: {words[-1]}" in done.stdout


DEVICE_WITHOUT_KERNELS = """
import sys, types, torch
from amp_core.cli import main
module = types.ModuleType("fox")
module.is_available = lambda: True
module.device_count = lambda: 1
module.current_device = lambda: 0
module.get_amp_supported_dtype = lambda: [torch.float16]
torch.utils.rename_privateuse1_backend("fox")
torch._register_device_module("fox", module)
sys.exit(main(["demo", "--device", "fox"]))
"""


def test_a_device_that_lacks_an_operation_is_one_line():
    """The maker of a device would have to read torch's page about dispatch keys to find the missing op."""
    done = subprocess.run(
        [sys.executable, "-c", DEVICE_WITHOUT_KERNELS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("amp demo: ")
    assert "aten::" in done.stderr
    assert done.stderr.count("\n") == 1
