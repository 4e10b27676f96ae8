"""The kernels' C source on other targets: aarch64 emulated, no vectors, Clang, and with GCC's sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "backends" / "cpu" / "amp_backend_cpu" / "native"
SANITIZERS = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
TARGETS = {
    "aarch64": (["aarch64-linux-gnu-gcc", "-static", "-fopenmp"], ["qemu-aarch64"], "NEON"),
    "scalar": (["gcc", "-fopenmp", "-DAMP_SCALAR"], [], "scalar"),
    "clang": (["clang", "-Wno-psabi"], [], ""),
    "sanitized": (["gcc", "-fopenmp", "-g", *SANITIZERS], [], ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_numbers_on_another_target(target: str, tmp_path: Path) -> None:
    """A loop gives other numbers on that target, reads beyond a tensor, or does not compile there."""
    compiler, emulator, name = TARGETS[target]
    for tool in (compiler[0], *emulator):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    program = tmp_path / "driver"
    source = HERE / "data" / "driver.c"
    subprocess.run(
        [*compiler, "-O2", "-Wall", "-I", str(NATIVE), "-o", str(program), str(source), "-lm", "-lpthread"],
        check=True,
        timeout=250,
    )
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[:2000]
    assert done.stdout.startswith(name)
