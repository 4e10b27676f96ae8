"""Backends of third parties, installed by pip into an environment of their own and run as processes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "amp-backend-example"

BROKEN_HOOKS = 'raise ImportError("libmaia.so.1: no such file")\n'

ABSENT_HOOKS = """
import torch
from amp_core.plugin import Availability, Backend, hookimpl

class MaiaBackend(Backend):
    device_type = "maia"
    api_version = 1

    def availability(self):
        return Availability(False, "no MAIA card in this machine")

    def default_dtype(self):
        return torch.bfloat16

    def supported_dtypes(self):
        return (torch.bfloat16,)

@hookimpl
def amp_register_backends(registry):
    registry.add(MaiaBackend())
"""

PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "amp-backend-maia"
version = "3.1"
[project.entry-points."amp_core.backends"]
maia = "amp_backend_maia"
[tool.setuptools]
py-modules = ["amp_backend_maia"]
"""


class Environment:
    """A virtual environment that sees this one's packages and has more of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        (where,) = folder.glob("lib/python*/site-packages")
        lines = [f"import site; site.addsitedir({p!r})" for p in site.getsitepackages()]
        (where / "surroundings.pth").write_text("\n".join(lines) + "\n")

    def install(self, source: Path) -> None:
        copy = self.folder / "sources" / source.name
        shutil.copytree(source, copy)
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "-q", str(copy)]
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--no-index"], check=True)

    def sh(self, line: str) -> subprocess.CompletedProcess[str] | None:
        """Run one command of a page: `amp`, `python`, or `pip install`."""
        words = shlex.split(line)
        if words[:2] == ["pip", "install"]:
            return self.install(self.folder / words[2])
        if words[0] == "amp":
            return self.run("-m", "amp_core", *words[1:])
        return self.run(*words[1:], PYTEST_ADDOPTS="-k update")  # `amp check` has run the whole kit

    def passes(self, script: str) -> None:
        """Fail unless a script of Python runs to its end."""
        done = self.run("-c", script)
        assert done.returncode == 0, done.stderr[-3000:]

    def run(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        return subprocess.run(
            [self.python, *args], cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    env = Environment(tmp_path_factory.mktemp("example") / "env")
    env.install(EXAMPLE)
    return env


def third_party(folder: Path, hooks: str) -> Path:
    source = folder / "maia"
    source.mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "amp_backend_maia.py").write_text(hooks)
    return source


# The kernels of this device, all of them portable, are checked once, as the page has it done.
HOOKS = ("availability", "dtypes", "policy", "regions", "functions", "scaler", "effects")


def test_the_example_passes_amp_check(example, tmp_path):
    """The page that makers of devices start from would lead to a wrong backend."""
    areas = [f"--area={area}" for area in HOOKS]
    page = str(tmp_path / "r.md")
    done = example.run("-m", "amp_core", "check", "npy", "--json", "--markdown", page, *areas)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    report = json.loads(done.stdout)
    assert report["backend"] == "amp_backend_example.backend.NpyBackend"
    assert {r["area"] for r in report["results"] if r["outcome"] == "passed"} == set(HOOKS)
    assert "npy: passes" in (tmp_path / "r.md").read_text()


def test_the_example_trains_the_demo(example, tmp_path):
    """A device that passes the kit must train a real model, in mixed precision, by name alone."""
    args = ["--device", "npy", "--model", "mlp", "--epochs", "3", "--output", str(tmp_path / "d.png")]
    done = example.run("-m", "amp_core", "demo", *args, MPLBACKEND="Agg")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert (tmp_path / "d.png").exists()


def test_the_examples_own_tests_pass(example):
    """The template's conftest and one-class test file are what third parties copy."""
    tests = example.folder / "sources" / EXAMPLE.name / "tests"
    done = example.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "dtype or update", str(tests))
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout


def test_the_amp_part_of_the_example_is_short():
    """The whole promise: one small package, no C++."""
    files = [EXAMPLE / "amp_backend_example" / name for name in ("backend.py", "hooks.py")]
    lines = [line for f in files for line in f.read_text().splitlines() if line.strip()]
    assert len(lines) <= 40


def test_a_device_that_follows_torchs_protocol_needs_no_backend(example):
    """Existing out-of-tree devices would not run, or could not be checked."""
    areas = [area for area in HOOKS if area != "effects"]
    script = (
        "import torch\n"
        "from amp_core import get_backend\n"
        "from amp_core.testing import check\n"
        "backend = get_backend('npy')\n"
        "assert type(backend).__name__ == 'TorchBackend', backend\n"
        "assert backend.supported_dtypes() == (torch.bfloat16, torch.float16)\n"
        f"report = check('npy', areas={areas})\n"
        "print(report.to_markdown())\n"
        "assert report.ok\n"
    )
    done = example.run("-c", script, AMP_PLUGIN_AUTOLOAD="0")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_module_rules_ask_a_device_for_no_more_than_regions_do(example):
    """A model with a float32 module would raise where the kit passes."""
    script = (
        "import torch\n"
        "import amp_core\n"
        "amp_core.get_backend('npy')\n"
        "del type(torch.npy).get_amp_supported_dtype\n"
        "model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(2))).to('npy')\n"
        "x = torch.ones(1, 2, device='npy')\n"
        "with amp_core.apply_policy(model, {'0': 'fp32'}), amp_core.autocast('npy'):\n"
        "    found = model[0](x).dtype, model(x).dtype, torch.is_autocast_enabled('npy')\n"
        "assert found == (torch.float32, torch.bfloat16, True), found\n"
    )
    example.passes(script)


def test_the_kit_knows_a_device_that_torch_has_no_rules_for(example):
    """The page's one line would fail the kit, and a module that breaks checkpoints would pass it."""
    script = (
        "import torch\n"
        "from amp_core import OpPolicy, get_backend\n"
        "from amp_core.testing import check\n"
        "class LikeCuda(type(get_backend('npy'))):\n"
        "    def op_policy(self):\n"
        "        return OpPolicy(self.device_type, OpPolicy.default('cuda').rules)\n"
        "report = check(LikeCuda(), areas=['policy'])\n"
        "assert report.ok and report.count('skipped') == 1, report.to_markdown()\n"
        "del type(torch.npy).get_amp_supported_dtype\n"
        "report = check(LikeCuda(), keyword='region_of_torch')\n"
        "assert report.failed == ['region_of_torch_can_be_built'], report.to_markdown()\n"
    )
    example.passes(script)


def test_the_kit_finds_op_lists_of_a_device_without_kernels_of_its_own(example):
    """The maker's rules would be ignored without a word."""
    script = (
        "from amp_core import get_backend\n"
        "from amp_core.testing import check\n"
        "class Listed(type(get_backend('npy'))):\n"
        "    op_lists = {'lower_precision_fp': 'mm addmm bmm linear'}\n"
        "report = check(Listed(), areas=['policy'])\n"
        "(failed,) = [result for result in report.results if result.outcome == 'failed']\n"
        "assert failed.check == 'policy_is_for_the_device', failed\n"
        "assert 'override op_policy' in failed.message, failed\n"
    )
    example.passes(script)


@pytest.mark.parametrize("hooks", [ABSENT_HOOKS, BROKEN_HOOKS], ids=["absent", "broken"])
def test_another_backend_beside_it_does_not_touch_it(tmp_path, hooks):
    """One vendor's fault would take the other vendor's device away."""
    env = Environment(tmp_path / "env")
    env.install(EXAMPLE)
    env.install(third_party(tmp_path, hooks))
    script = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import amp_core, torch\n"
        "status = amp_core.backends()\n"
        "print(status['maia'].status, '|', status['maia'].reason)\n"
        "assert status['npy'].status == 'available', status['npy']\n"
        "x = torch.ones(2, 2, device='npy')\n"
        "with amp_core.autocast('npy'):\n    assert (x @ x).dtype is torch.bfloat16\n"
    )
    done = env.run("-c", script)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = "failed | " if hooks is BROKEN_HOOKS else "absent | no MAIA card"
    assert expected in done.stdout
    if hooks is BROKEN_HOOKS:
        assert "libmaia.so.1" in done.stdout


def device_alone(folder: Path) -> Path:
    """The example's device without its backend: what a maker of hardware has before amp-core."""
    source = folder / "npy-device"
    shutil.copytree(EXAMPLE, source)
    text = (source / "pyproject.toml").read_text()
    head, _, rest = text.partition('[project.entry-points."amp_core.backends"]')
    (source / "pyproject.toml").write_text(head + rest.partition("\n\n")[2])
    return source


def test_every_command_of_bring_your_device_works(tmp_path):
    """A maker of a device who follows the page would get stuck."""
    from amp_core.testing.suite import AREAS

    env = Environment(tmp_path / "env")
    env.install(device_alone(tmp_path))
    page = (ROOT / "docs" / "how-to" / "bring-your-device.md").read_text()
    commands = [line[2:] for line in page.splitlines() if line.startswith("$ ")]
    assert len(commands) == 5
    for command in commands:
        done = env.sh(command)
        if done is not None:
            assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
    report = (env.folder / "report.md").read_text()
    assert "npy: passes" in report
    assert all(f"| {area} |" in report for area in AREAS)
