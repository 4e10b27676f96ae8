"""The machine code of the compiled CPU kernels: what the compiler did with the vectors of the source."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess

import pytest

from amp_backend_cpu import library

REGISTERS = {"sse2": "xmm", "avx2": "ymm", "avx512": "zmm"}

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="reads the instructions of x86-64"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed"),
    pytest.mark.skipif(not library.path().exists(), reason="no compiled kernels"),
]


QUANTIZING = [
    f"{result}_{elements}"
    for result in ("round", "code")
    for elements in ("run", "columns", "bounded_run", "drawn_run", "drawn_columns")
]


def instructions(function: str) -> list[tuple[int, str]]:
    """Return the addresses and instructions of a function."""
    command = ["objdump", "-d", "--no-show-raw-insn", f"--disassemble={function}", str(library.path())]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^\s+([0-9a-f]+):\s+(.*)$", listing, re.MULTILINE)
    return [(int(address, 16), text) for address, text in lines]


def inner_loops(function: str) -> list[list[str]]:
    """Return the instructions of each loop that holds no other loop and computes on vectors."""
    code = instructions(function)
    jumps = [(re.match(r"j\w+\s+([0-9a-f]+)", text), address) for address, text in code]
    loops = [(int(m.group(1), 16), a) for m, a in jumps if m and code[0][0] <= int(m.group(1), 16) < a]
    inner = [i for i in loops if not any(o != i and i[0] <= o[0] and o[1] <= i[1] for o in loops)]
    bodies = [[text for address, text in code if start <= address <= end] for start, end in inner]
    return [body for body in bodies if sum("mm" in text for text in body) >= 16]


@pytest.mark.parametrize("width", REGISTERS)
@pytest.mark.parametrize("loop", ["stats_f32", "stats_bf16", "multiply_f32"])
def test_vectors_stay_in_registers_of_the_right_width(loop: str, width: str) -> None:
    """The compiler lowers the vectors of a hot loop to memory, or to registers that the target lacks."""
    bodies = [b for b in inner_loops(f"{loop}_{width}") if len(b) < 80 and not any("cvt" in t for t in b)]
    assert bodies, "the disassembly has no such loop"
    for body in bodies:
        vectors = [text for text in body if "mm" in text]
        assert not [text for text in vectors if re.search(r"\(%r[sb]p", text)]
        assert {r for text in vectors for r in re.findall(r"[xyz]mm", text)} == {REGISTERS[width]}


@pytest.mark.parametrize("register", ["least", "avx2", "avx512"])
@pytest.mark.parametrize("loop", QUANTIZING)
def test_quantising_multiplies_vectors(loop: str, register: str) -> None:
    """The compiler leaves a loop of quantising scalar, which takes several times as long."""
    width = REGISTERS.get(register, "xmm")
    code = instructions(f"{loop}_{register}")
    assert [text for _, text in code if re.match(rf"v?mulps .*%{width}", text)]
