"""A virtual environment with good and broken plugin packages, really built and installed by pip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from pathlib import Path
from typing import Any, Protocol

import pytest

GOOD = """
import torch
from amp_core.plugin import Availability, Backend, hookimpl

class GoodBackend(Backend):
    device_type = "{device}"
    api_version = 1
    def availability(self):
        return Availability(True, "always there")
    def default_dtype(self):
        return torch.bfloat16
    def supported_dtypes(self):
        return (torch.bfloat16,)

@hookimpl
def amp_register_backends(registry):
    registry.add(GoodBackend())
"""

KNOWN = '\ntorch.utils.rename_privateuse1_backend("good")  # a process has room for one such device\n'

# Serves two device types, which torch does not know, from one module, and one of its entry points has another
# name: a device type of torch's, which torch cannot autocast.
PAIR = (
    GOOD.format(device="pair")
    + """    other = GoodBackend()
    other.device_type = "unannounced"
    registry.add(other)
"""
)

CHANGES = """
import os
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.manual_seed(5)
os.chdir("/")
torch.set_flush_denormal(True)
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
"""

# Asks amp-core for the others while it is being loaded, then fails.
ASKING = """
import amp_core
names = sorted(amp_core.backends())
raise RuntimeError(f"saw good: {'good' in names}")
"""

BROKEN = {
    "asking": ASKING,
    "missing": "import a_library_that_nobody_has",
    "syntax": "def broken(:",
    "raising": "raise OSError('libfoo.so: cannot open shared object file')",
    "version": GOOD.format(device="version").replace("api_version = 1", "api_version = 99"),
    "unversioned": GOOD.format(device="unversioned").replace("api_version = 1", ""),
    "aclass": GOOD.format(device="aclass").replace("GoodBackend())", "GoodBackend)"),
    "greedy": GOOD.format(device="cpu"),
    "argument": GOOD.format(device="argument").replace("(registry)", "(registry, config)"),
    "misspelt": GOOD.format(device="misspelt").replace("amp_register_backends", "amp_register_backend"),
    "halfway": GOOD.format(device="halfway") + "    raise RuntimeError('half done')\n",
    "silent": "",
    "nameless": GOOD.format(device=""),
    "indexed": GOOD.format(device="indexed:0"),
    "capital": GOOD.format(device="Capital"),
    # As pytest.importorskip does, whose exception is no Exception either.
    "base": "raise type('Skipped', (BaseException,), {})('no device')",
    "abstract": GOOD.format(device="abstract").replace("def default_dtype", "def default_type"),
    "twin": GOOD.format(device="good"),
    "hpu": GOOD.format(device="hqu"),
    "exits": "import sys; sys.exit('no licence')",
    "later": GOOD.format(device="later"),
}


OTHERWISE = "amp-core>=99; extra == 'dev'", "amp_core (>=99); python_version < '3'"
REQUIRES = {"later": ("torch", "amp-core>=2"), "pair": OTHERWISE}


def write_source(root: Path, name: str, source: str) -> Path:
    """Write the source tree of a distribution whose entry point is a module with `source`."""
    folder = root / name
    package = folder / f"amp_backend_{name}"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "hooks.py").write_text(source)
    (folder / "pyproject.toml").write_text(
        f"""
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "amp-backend-{name}"
version = "3.1"
[project.entry-points."amp_core.backends"]
{name} = "amp_backend_{name}.hooks"
[tool.setuptools]
packages = ["amp_backend_{name}"]
"""
    )
    return folder


def write_wheel(root: Path, name: str, source: str, *aliases: str) -> Path:
    """Write a wheel whose entry points, `name` and `aliases`, are one module with `source`.

    Building it from source would take two seconds for each of the broken packages.
    """
    package, info = f"amp_backend_{name}", f"amp_backend_{name}-3.1.dist-info"
    declared = "\n".join(f"{n} = {package}.hooks" for n in (name, *aliases))
    requires = "".join(f"Requires-Dist: {r}\n" for r in REQUIRES.get(name, ()))
    files = {
        f"{package}/__init__.py": "",
        f"{package}/hooks.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: amp-backend-{name}\nVersion: 3.1\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[amp_core.backends]\n{declared}\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    path = root / f"{package}-3.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    return path


class Run(Protocol):
    def __call__(self, code: str, **environment: str) -> Any: ...


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs code in the environment and gives back the JSON that it prints."""
    root = tmp_path_factory.mktemp("plugins")
    venv.create(root / "env", with_pip=False)
    scripts = root / "env" / ("Scripts" if os.name == "nt" else "bin")
    site = Path(sysconfig.get_path("purelib", vars={"base": str(root / "env")}))
    # addsitedir, so that an editable amp-core is found as well
    (site / "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    packages = [write_source(root, "good", GOOD.format(device="good") + KNOWN)]
    packages += [write_wheel(root, "pair", PAIR, "opencl")]
    packages += [write_wheel(root, name, source) for name, source in BROKEN.items()]
    python = str(scripts / "python")
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", *packages],
        check=True,
        capture_output=True,
    )

    def run(code: str, **environment: str) -> Any:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("AMP_", "PYTHON"))}
        done = subprocess.run(
            [python, "-c", textwrap.dedent(code)],
            env={**clean, **environment},
            capture_output=True,
            text=True,
            cwd=root,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def changing() -> str:
    """The source of a plugin that works, and changes settings of the program as it is imported."""
    return GOOD.format(device="changing") + CHANGES


@pytest.fixture
def broken() -> list[str]:
    """The names of the broken plugins."""
    return sorted(BROKEN)


@pytest.fixture(scope="session")
def interpreter() -> str:
    """The interpreter that runs the tests."""
    return sys.executable
