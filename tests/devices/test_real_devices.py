"""The kit, the demo, cached casts and a record on devices that others made: ``tox run -e real-devices``.

Each has a backend here, ``amp-backend-DEVICE``, written as the documentation says. A process has room for one
PrivateUse1 device, so each is installed into a folder of its own and used in processes of their own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
HERE = Path(__file__).parent
REPORTS = HERE.parents[1] / "docs" / "reports"
FIXTURES = {
    "mycelya": "amp_backend_mycelya.fixtures:MycelyaFixtures",
    "openreg": "amp_backend_openreg.fixtures:OpenregFixtures",
}

CASTS_AND_RECORD = """
import sys
import torch
import amp_core

device = sys.argv[1]
amp_core.get_backend(device)  # which makes the device known to torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(device)
x = torch.randn(4, 8).to(device)
with amp_core.autocast(device):
    plain = model(x).cpu()
with amp_core.cached_casts(model), amp_core.autocast(device):
    kept = [model(x).cpu() for _ in range(2)]
assert plain.dtype is torch.bfloat16
assert all(torch.equal(plain, k) for k in kept), (plain, kept)
with torch.no_grad():
    model[2].weight.zero_()
    model[2].bias.fill_(3.0)
with amp_core.cached_casts(model), amp_core.autocast(device):
    assert model(x).cpu().tolist() == [[3.0]] * 4
with amp_core.record() as record, amp_core.autocast(device):
    loss = model(x).float().square().mean()
loss.backward()
assert "lower_precision_fp" in str(record), record
assert float(model[2].bias.grad) == 6.0
"""


class Device:
    """A device type whose packages are in a folder of their own."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    def install(self, source: Path) -> None:
        """Build and install a package that is already on this machine."""
        copy = self.folder / "sources" / source.name  # a build writes into its source
        shutil.copytree(source, copy)
        build = copy / "third_party" / "openreg" / "CMakeLists.txt"
        if build.exists():  # its own tests need googletest, which is elsewhere in torch's tree
            text = build.read_text()
            build.write_text(text.replace('"Build and run unit tests" ON', '"Build and run unit tests" OFF'))
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index"]
        done = subprocess.run(
            [*pip, "--no-deps", "--no-build-isolation", "--target", self.folder / "site", copy],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    def run(self, *args: object) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
        env["PYTHONPATH"] = str(self.folder / "site")
        words = [sys.executable, *map(str, args)]
        return subprocess.run(words, cwd=self.folder, env=env, capture_output=True, text=True, check=False)


def source_of(name: str) -> Path | None:
    """Return the source that the device must be built from, None where it is installed, or skip."""
    if name == "mycelya":
        if importlib.util.find_spec("mycelya_torch") is None:
            pytest.skip(
                "mycelya-torch, which is under the AGPL, is installed by `tox run -e real-devices` alone"
            )
        return None
    tree = os.environ.get("AMP_TEST_OPENREG")
    if not tree:
        pytest.skip("AMP_TEST_OPENREG names no source of torch_openreg; no package of the index carries one")
    inside = Path(tree, "test", "cpp_extensions", "open_registration_extension", "torch_openreg")
    return inside if inside.is_dir() else Path(tree)


@pytest.fixture(scope="module", params=["mycelya", "openreg"])
def device(request, tmp_path_factory):
    source = source_of(request.param)
    found = Device(request.param, tmp_path_factory.mktemp(request.param))
    if source is not None:
        found.install(source)
    found.install(HERE / f"amp-backend-{request.param}")
    return found


def test_the_backend_passes_the_kit(device):
    """What the documentation tells makers of devices would not do for a device that nobody here made."""
    fixtures = [f"--fixtures={FIXTURES[device.name]}"] if device.name in FIXTURES else []
    done = device.run("-m", "amp_core", "check", device.name, "--json", *fixtures)
    assert done.stdout, done.stderr[-3000:]
    results = json.loads(done.stdout)["results"]
    assert not {r["check"]: r["message"] for r in results if r["outcome"] == "failed"}
    published = REPORTS / f"{device.name}.json"
    if published.exists():
        known = {r["check"]: r["outcome"] for r in json.loads(published.read_text())["results"]}
        assert {r["check"]: r["outcome"] for r in results} == known


def test_the_demo_trains(device):
    """Mixed precision would work in the kit and not in a training loop."""
    args = ("--device", device.name, "--model", "mlp", "--epochs", "1", "--output", "demo.png")
    done = device.run("-m", "amp_core", "demo", *args)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (device.folder / "demo.png").exists()


def test_cached_casts_and_a_record(device):
    """Casts that are kept, or a record of ops, would need more of a device than the kit checks."""
    done = device.run("-c", CASTS_AND_RECORD, device.name)
    assert done.returncode == 0, done.stderr[-3000:]
