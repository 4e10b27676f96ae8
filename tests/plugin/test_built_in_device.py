"""Another built-in device: a folder under backends/ and one line of pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TREE = Path(__file__).parents[2]

BACKEND = """
import torch
from amp_core.plugin import Availability, Backend, hookimpl

class AcmeBackend(Backend):
    device_type = "acme"
    api_version = 1
    has_float64 = False

    def availability(self):
        return Availability(True, "one card")

    def default_dtype(self):
        return torch.bfloat16

    def supported_dtypes(self):
        return (torch.bfloat16,)

@hookimpl
def amp_register_backends(registry):
    registry.add(AcmeBackend())
"""

USE = """
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
_setup_privateuseone_for_python_backend("acme")
import amp_core
from amp_core.plugin import Owner
status = amp_core.backends()["acme"]
assert (status.status, status.distribution) == ("available", "amp-core"), status
assert {"cpu", "cuda", "xpu", "mps"} <= amp_core.backends().keys()
with amp_core.autocast("acme"):
    assert torch.get_autocast_dtype("acme") is torch.bfloat16
assert not amp_core.get_backend("acme").kernels()._has_float64
print(amp_core.__file__, status.path)
"""


def _write_device(tree: Path) -> None:
    package = tree / "backends" / "acme" / "amp_backend_acme"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "py.typed").write_text("")
    (package / "hooks.py").write_text(BACKEND)
    pyproject = tree / "pyproject.toml"
    table = '[project.entry-points."amp_core.backends"]\n'
    text = pyproject.read_text().replace(table, f'{table}acme = "amp_backend_acme.hooks"\n')
    pyproject.write_text(text)


def _use(path: Path, *others: Path, code: str = USE) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AMP_")} | {
        "PYTHONPATH": os.pathsep.join(map(str, (path, *others)))
    }
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(path))
    return done.stdout


def _check_fallback(tree: Path, vendor: Path) -> None:
    """Check that a vendor's package serves the device in place of a built-in fallback."""
    hooks = tree / "backends" / "acme" / "amp_backend_acme" / "hooks.py"
    hooks.write_text(BACKEND.replace("AcmeBackend())", "AcmeBackend(), fallback=True)"))
    _use(tree)
    info = vendor / "vendor_acme-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor-acme\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[amp_core.backends]\nacme = vendor_acme\n")
    (vendor / "vendor_acme.py").write_text(BACKEND)
    _use(tree, vendor, code=USE.replace('"amp-core")', '"vendor-acme")'))
    hooks.write_text(BACKEND)


def test_a_folder_and_a_line_add_a_device(tmp_path: Path) -> None:
    """Another built-in device needs a change of the core, or is missing from the wheel or from a checkout."""
    tree, site = tmp_path / "tree", tmp_path / "site"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "build", "*.egg-info")
    tree.mkdir()
    for name in ("amp_core", "backends", "compat"):
        shutil.copytree(TREE / name, tree / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(TREE / name, tree / name)
    _write_device(tree)
    _use(tree)  # as a checkout that was not installed again
    _check_fallback(tree, tmp_path / "vendor")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    # Without a compiler the optional libraries are left out, which is all that this saves: time.
    environment = {**os.environ, "CC": "false"}
    subprocess.run([*command, "--no-index", "--target", site, tree], env=environment, check=True)
    assert "site/amp_backend_acme" in _use(site)
    declared = next(site.glob("amp_core-*.dist-info")) / "entry_points.txt"
    assert "acme = amp_backend_acme.hooks" in declared.read_text()
    declared.unlink()  # lost metadata loses no built-in device
    _use(site)
