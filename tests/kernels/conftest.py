"""What the tests of the compiled kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from amp_backend_cpu import kernels as cpu

COMPILED = cpu.load()


def _sets() -> dict[str, int]:
    x86 = {"AVX-512": 2, "AVX2": 1, "SSE2 and F16C": 0, "SSE2": -1}
    if not isinstance(COMPILED, cpu.Compiled):
        return x86
    name = COMPILED._library.amp_instruction_set().decode()
    return x86 if name in x86 else {name: 2}  # other processors have one


SETS = _sets()


@pytest.fixture(params=list(SETS))
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each instruction set in turn that this processor has."""
    if not isinstance(COMPILED, cpu.Compiled):
        yield
        return
    library = COMPILED._library
    before = library.amp_limit(SETS[request.param])
    try:
        if library.amp_instruction_set().decode() != request.param:
            pytest.skip(f"this processor, or the compiler, has no {request.param}")
        yield
    finally:
        library.amp_limit(before)
