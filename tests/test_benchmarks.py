"""The command line of ``python -m benchmarks``: what it refuses before it measures for minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["regoins"], "There is no group 'regoins'; the groups are regions,"),
        (["regions", "--json", "no/such/folder.json"], "no/such/folder.json cannot be written"),
        (["regions", "--device", "nosuch"], "No backend serves device type 'nosuch'"),
        (["regions", "--capability", "all", "--json", "out.json"], "overwrite the file of the one before"),
        (["regions", "--cap", "all"], "unrecognized arguments: --cap"),
    ],
)
def test_what_cannot_be_measured(options: list[str], message: str) -> None:
    """A mistake is a traceback, or is found after the measurements; `--cap all` starts itself for ever."""
    done = run(*options)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif("AVX512" in torch.backends.cpu.get_cpu_capability(), reason="this processor has AVX-512")
def test_an_instruction_set_that_the_cpu_lacks() -> None:
    """Torch believes the variable and crashes, and the figures end in the middle."""
    done = run("regions", "--capability", "avx512")
    assert done.returncode == 1
    assert done.stderr.startswith("This CPU has no avx512; it has default")
