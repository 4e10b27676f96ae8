"""The command line of ``python -m benchmarks``: what it refuses before it measures, and what it keeps."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(
    "file", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda f: f.stem
)
def test_each_group_has_its_header(file: Path) -> None:
    """A figure stands under a header that another group was measured with."""
    for group in json.loads(file.read_text()).values():
        assert group["rows"]
        assert group["machine"]["capability"].lower() == file.stem.rpartition("-")[2]


KEEPING = """
import pathlib, sys
from benchmarks import __main__ as command, machine

command.RESULTS = pathlib.Path(sys.argv.pop(1))
machine.slug = lambda: "cpu"
machine.refuse_a_mixture = lambda: None  # the environment of the tests may be one
command.main()
"""


def test_other_groups_keep_their_headers(tmp_path: Path) -> None:
    """`--keep` puts its own header over the figures of an earlier run, or loses them."""
    earlier = {"casts": {"machine": {"torch": "earlier"}, "rows": []}}
    kept = tmp_path / f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}.json"
    kept.write_text(json.dumps(earlier))
    command = [sys.executable, "-c", KEEPING, str(tmp_path), "regions", "--keep"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    groups = json.loads(kept.read_text())
    assert groups["casts"] == earlier["casts"]
    assert groups["regions"]["machine"]["torch"] == torch.__version__
    assert {row["unit"] for row in groups["regions"]["rows"]} == {"s"}
