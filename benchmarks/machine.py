"""What the figures were measured on, and a refusal where two installs are mixed."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

import amp_core
from amp_core.common.environment import CPU_CAPABILITY

ROOT = Path(__file__).parents[1]
CAPABILITIES = ("default", "avx2", "avx512")


def refuse_a_mixture() -> None:
    """Stop where amp-core is this source tree's and its CPU backend is not, or the other way round.

    Raises:
        SystemExit: the two come from different places; what is compiled in one is not in the other.
    """
    places = {name: _place(name) for name in ("amp_core", "amp_backend_cpu")}
    inside = {place.is_relative_to(ROOT) for place in places.values()}
    if len(inside) > 1:
        listed = "; ".join(f"{name} from {place}" for name, place in places.items())
        raise SystemExit(
            f"These figures would be of no version of amp-core: {listed}. Install the source tree with "
            "`pip install -e .`, or run the benchmarks from outside of it."
        )


def _place(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed: run `pip install -e .` in the source tree.")
    return Path(spec.origin).resolve()


def capabilities() -> tuple[str, ...]:
    """Return the instruction sets that the CPU has. torch crashes under one that it lacks."""
    command = [sys.executable, "-c", "import torch; print(torch.backends.cpu.get_cpu_capability())"]
    unforced = {name: value for name, value in os.environ.items() if name != CPU_CAPABILITY}
    best = subprocess.check_output(command, env=unforced, text=True).strip().lower()
    return CAPABILITIES[: CAPABILITIES.index(best) + 1] if best in CAPABILITIES else ("default",)


def model() -> str:
    """Return the CPU's name as the system gives it, and its family and model: many a host hides the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text()
    except OSError:
        lines = ""
    found = dict(reversed(re.findall(r"^(cpu family|model|model name)\s*:\s*(.+)$", lines, re.MULTILINE)))
    if len(found) < 3:  # as on ARM
        return platform.processor() or platform.machine()
    return f"{found['model name']} (family {found['cpu family']}, model {found['model']})"


def slug() -> str:
    """Return the CPU's name as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", model().lower()).strip("-")


def header(device: str) -> dict[str, str]:
    """Return what decides the figures, by name."""
    kernels = amp_core.get_backend(device).kernels()
    library = getattr(kernels, "_library", None)
    return {
        "CPU": f"{model()}, {os.cpu_count()} cores",
        **({} if device == "cpu" else {"GPU": torch.get_device_module(device).get_device_name()}),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "kernels": f"{kernels.name} ({kernels.reason})",
        "compiler": library.amp_compiler().decode() if library is not None else "none",
        "amp-core from": "the source tree" if _place("amp_core").is_relative_to(ROOT) else "an install",
    }
