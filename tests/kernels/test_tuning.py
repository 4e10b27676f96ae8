"""Which instruction set the compiled CPU kernels use, what they measure, and how both are forced."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from amp_backend_cpu import kernels as cpu
from amp_backend_cpu import library

KERNELS = cpu.load()
needs_library = pytest.mark.skipif(not isinstance(KERNELS, cpu.Compiled), reason="no compiled kernels")


def reason(**variables: str) -> str:
    """Return what the CPU's kernels say of themselves under these environment variables."""
    command = [sys.executable, "-c", "import amp_core; print(amp_core.get_backend('cpu').kernels().reason)"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_library
@pytest.mark.parametrize(
    ("capability", "name"), [("default", "SSE2 and F16C"), ("avx2", "AVX2"), ("avx512", "AVX-512")]
)
def test_the_capability_of_torch_limits_ours(capability: str, name: str) -> None:
    """Our side of a comparison runs on more than torch's, or the listing does not say so."""
    shown = reason(ATEN_CPU_CAPABILITY=capability, AMP_CPU_STREAMING="0")
    if KERNELS._library.amp_instruction_set().decode() != "AVX-512":
        pytest.skip("this processor has no AVX-512")
    used = f"{name} (ATEN_CPU_CAPABILITY={capability}), OpenMP"
    assert shown == f"{used}; streaming off (AMP_CPU_STREAMING); a few small gradients by torch"


@needs_library
@pytest.mark.parametrize(("pinned", "state"), [("1", "on"), ("0", "off")])
def test_what_is_pinned_is_in_force(pinned: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is read but something else is used."""
    monkeypatch.setenv("AMP_CPU_STREAMING", pinned)
    before = KERNELS._library.amp_stream(-1)
    try:
        assert str(library.Tuning(KERNELS._library)) == f"streaming {state} (AMP_CPU_STREAMING)"
        assert KERNELS._library.amp_stream(-1) == int(pinned)
    finally:
        KERNELS._library.amp_stream(before)


def test_a_misspelt_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is no switch is taken for one."""
    monkeypatch.setenv("AMP_CPU_STREAMING", "fast")
    with pytest.raises(ValueError, match="AMP_CPU_STREAMING='fast' is not a switch"):
        library._env.cpu_streaming()


@needs_library
def test_what_is_measured_is_shown() -> None:
    """The calibration leaves nothing that can be read."""
    assert "(measured)" in reason(AMP_CPU_STREAMING="")


def test_a_missing_library_is_mentioned_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An install without a compiler says nothing of what is slower, or one that was asked for warns."""
    monkeypatch.setattr(library, "path", lambda: Path("nowhere"))
    with caplog.at_level(logging.WARNING, "amp_core"):
        with pytest.raises(library.LibraryMissingError):
            library.load()
        assert "without a C compiler" in caplog.text
        caplog.clear()
        monkeypatch.setenv("AMP_COMPILED", "0")
        with pytest.raises(library.LibraryMissingError):
            library.load()
        assert not caplog.text
