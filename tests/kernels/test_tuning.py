"""Which instruction set the compiled CPU kernels use, what they measure, and how both are forced."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


SETS = {"default": "SSE2 and F16C", "avx2": "AVX2", "avx512": "AVX-512"}


@needs_library
@pytest.mark.parametrize("capability", SETS)
def test_the_capability_of_torch_limits_ours(capability: str) -> None:
    """Our side of a comparison runs on more than torch's, or the listing does not say so."""
    best = KERNELS._library.amp_instruction_set().decode()
    if best not in SETS.values():
        pytest.skip(f"this processor has {best}")
    present = [*SETS][: [*SETS.values()].index(best) + 1]
    effect = "" if capability in present else ": this CPU lacks it, and torch's kernels crash"
    name = SETS[capability] if capability in present else best
    used = f"{name} (ATEN_CPU_CAPABILITY={capability}{effect})"
    shown = reason(ATEN_CPU_CAPABILITY=capability, AMP_CPU_STREAMING="0")
    assert shown == f"{used}, OpenMP; streaming off (AMP_CPU_STREAMING); a few small gradients by torch"


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
    """The calibration leaves nothing that can be read, or not how to keep its outcome."""
    shown = reason(AMP_CPU_STREAMING="")
    assert re.search(
        r"streaming (on \(measured; AMP_CPU_STREAMING=1|off \(measured; AMP_CPU_STREAMING=0) pins it\)", shown
    )


@needs_library
@pytest.mark.parametrize("value", ["AVX2", "none", " default"])
def test_a_capability_that_torch_ignores(value: str) -> None:
    """A value that limits nothing is shown as the limit."""
    assert f" (ATEN_CPU_CAPABILITY={value} has no effect), OpenMP" in reason(ATEN_CPU_CAPABILITY=value)


@needs_library
def test_a_late_setting_is_not_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is set after the choice was made is named as its reason."""
    kernels = cpu.Compiled(KERNELS._library)
    limit = "avx2" if torch.backends.cpu.get_cpu_capability() == "DEFAULT" else "default"
    before = kernels.reason
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", limit)
    monkeypatch.setenv("AMP_CPU_STREAMING", str(1 - KERNELS._library.amp_stream(-1)))
    after = kernels.reason
    assert after.partition("; ")[2] == before.partition("; ")[2]
    assert f"(ATEN_CPU_CAPABILITY={limit} has no effect)" in after


@needs_library
def test_a_misspelt_pin_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training begins, and ends at the first large cast."""
    monkeypatch.setenv("AMP_CPU_STREAMING", "fast")
    with pytest.raises(ValueError, match="AMP_CPU_STREAMING='fast' is not a switch"):
        cpu.Compiled(KERNELS._library)


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_while_another_thread_measures() -> None:
    """The child of a program that forks while a thread measures waits for that thread for ever."""
    program = """
import os, threading
from amp_backend_cpu import kernels
tuning, held, done = kernels.load()._tuning, threading.Event(), threading.Event()
def measure():
    with tuning._lock:
        held.set()
        done.wait()
thread = threading.Thread(target=measure)
thread.start()
held.wait()
child = os.fork()
if not child:
    tuning.settle()
    os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
done.set()
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "3", done.stderr


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
